"""Whether a model answers the same with the cache as without: `larder bench accuracy`.

`questions` (text to questions), `prompts`, `completions` (the OpenAI API as values), `verdicts` and `report` decide and
do no I/O. `data_files` reads folders, `endpoint` speaks HTTP, `passes` asks all. Called by the CLI alone; imports
nothing of an engine, an agent or Redis, so that it can run against any OpenAI endpoint from anywhere.
"""
