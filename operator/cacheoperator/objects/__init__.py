"""Builders of Kubernetes objects, one file per part of a KVCache. Pure: (manifest, refs, settings) in, dicts out."""
