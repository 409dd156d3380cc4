"""kubectl larder: what a KVCache in a cluster is doing, in words, for whoever is asked at 3 a.m.

`cluster` and `agents` read, by running kubectl; `status`, `explain` and `redaction` decide what to say, purely;
`report` packs; `commands` are the flags. Needs no Kubernetes library: kubectl knows how to log in.
"""
