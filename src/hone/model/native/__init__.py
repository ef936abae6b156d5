"""The decoder's pass over tokens in C++, for a CPU that has a compiler: built at the first use, and then kept."""
