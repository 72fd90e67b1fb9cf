"""The calls of tools/one_shape_each.py: a module per family of ops, a function per group."""
