"""The operator: one KVCache resource becomes Redis, agents, engines, a router and one endpoint, and a status in words.

The pure core: `render` (manifest, refs, settings → objects), `difference` (what an apply would change), `status`
(observed → conditions). The edges: `watch` (kopf), `reconcile`, `cluster` (the API server), `observe`, `web`.
"""
