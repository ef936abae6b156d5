"""The C++ library of the CPU: its sources, and `library`, which compiles and calls it.

May import: storage.names (which says where compiled files are kept).
"""
