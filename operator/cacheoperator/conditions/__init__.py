"""One file per condition: an ordered list of small checks, the first that finds something decides. Pure."""
