"""The native backend: C++ kernels on numpy buffers, without torch. The C++ is in csrc/."""
