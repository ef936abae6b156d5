"""The C++ library of the CPU: its sources, and `library`, which compiles and calls it."""
