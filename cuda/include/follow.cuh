// How kernels of a stream follow one another.
#pragma once

// The first statement of every kernel; the build checks it. From compute capability 9.0 on, a kernel starts while the kernel before it
// still runs (programmatic dependent launch). `follow` lets the next kernel start when all blocks of this one have started, and waits
// until all work before this kernel is complete and its results can be read. So the time between two kernels is short, and nothing else
// changes.
// Source: https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-griddepcontrol
__device__ __forceinline__ void follow() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;\n"
                 "griddepcontrol.wait;\n" ::
                     : "memory");
#endif
}
