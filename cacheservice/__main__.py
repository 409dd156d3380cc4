"""`python -m cacheservice`: the agent's command line."""

from cacheservice.agent.command import app

if __name__ == "__main__":
    app(prog_name="python -m cacheservice")
