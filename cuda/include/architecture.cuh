// The architecture that the code is compiled for. Some parameters of kernels depend on it.
#pragma once

// A hundred times the compute capability: 860 for 8.6. 0 in code for the host.
#if defined(__CUDA_ARCH__)
constexpr int ARCHITECTURE = __CUDA_ARCH__;
#else
constexpr int ARCHITECTURE = 0;
#endif

// Whether a multiprocessor has 100 KiB of shared memory, of which each block takes 1 KiB more than it asks for. On the other
// supported architectures (8.0 is the lowest) it has 164 KiB or more.
constexpr bool HAS_SMALL_SHARED_MEMORY = ARCHITECTURE == 860 || ARCHITECTURE == 890 || ARCHITECTURE >= 1200;
