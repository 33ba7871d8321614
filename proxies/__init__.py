"""Expert pruning for mixture-of-experts checkpoints: a safetensors folder in, a smaller one out.

`proxies.build.build` does the whole job; `proxies.families.family_of` tells where an architecture keeps its
experts; `proxies.verify.check_loadable` says whether a folder can be used at all. Nothing is imported here, so
that `import proxies` costs nothing.
"""
