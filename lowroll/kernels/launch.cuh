// The host's side of a launch, for all sources of this room.
#pragma once
#include <cuda_runtime.h>

constexpr int MAX_DEVICES = 64;

// Lets a kernel have so many bytes of shared memory on the current device; asks the driver once a device.
template <auto KERNEL> static cudaError_t give_memory(int bytes) {
    static bool given[MAX_DEVICES] = {};
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess && !given[device % MAX_DEVICES]) {
        error = cudaFuncSetAttribute(KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
        given[device % MAX_DEVICES] = error == cudaSuccess;
    }
    return error;
}

// What a launch is told: clusters of `ranks` blocks (0: none), and whether it may start while the kernel before ends.
struct Launch {
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute attributes[2] = {};

    Launch(dim3 blocks, int threads, size_t bytes, int ranks, bool early, cudaStream_t stream) {
        config.gridDim = blocks, config.blockDim = threads, config.dynamicSmemBytes = bytes, config.stream = stream;
        config.attrs = attributes;
        if (ranks) {
            cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
            cluster.id = cudaLaunchAttributeClusterDimension;
            cluster.val.clusterDim.x = ranks, cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
        }
        if (early) {
            cudaLaunchAttribute& overlap = attributes[config.numAttrs++];
            overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
            overlap.val.programmaticStreamSerializationAllowed = 1;
        }
    }
    Launch(const Launch&) = delete;                     // the configuration points into it
};
