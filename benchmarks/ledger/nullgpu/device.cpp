// The GPUs that can be played, by NULLGPU_DEVICE. Memory as torch reports it for the product, to 0.1 GiB.
#include "nullgpu.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace nullgpu {
namespace {

constexpr std::size_t MiB = 1 << 20;
constexpr int KiB = 1 << 10;

const Device DEVICES[] = {
    // key, name, capability, memory, SMs, threads per SM, shared memory per block and per SM, L2, bits of the bus
    {"h200", "NVIDIA H200", 9, 0, 143156 * MiB, 132, 2048, 227 * KiB, 228 * KiB, 60 * (int)MiB, 6144},
    // a card that nobody sells, to see how much memory a step would take
    {"h200_1tb", "NVIDIA H200", 9, 0, 1048576 * MiB, 132, 2048, 227 * KiB, 228 * KiB, 60 * (int)MiB, 6144},
    {"h100", "NVIDIA H100 80GB HBM3", 9, 0, 81000 * MiB, 132, 2048, 227 * KiB, 228 * KiB, 50 * (int)MiB, 5120},
    {"b200", "NVIDIA B200", 10, 0, 182600 * MiB, 148, 2048, 227 * KiB, 228 * KiB, 126 * (int)MiB, 8192},
    {"rtx5090", "NVIDIA GeForce RTX 5090", 12, 0, 32109 * MiB, 170, 1536, 99 * KiB, 100 * KiB, 96 * (int)MiB, 512},
    {"rtx4090", "NVIDIA GeForce RTX 4090", 8, 9, 24200 * MiB, 128, 1536, 99 * KiB, 100 * KiB, 72 * (int)MiB, 384},
    {"a100", "NVIDIA A100-SXM4-80GB", 8, 0, 81000 * MiB, 108, 2048, 163 * KiB, 164 * KiB, 40 * (int)MiB, 5120},
};

const Device& chosen() {
  const char* key = getenv("NULLGPU_DEVICE");
  if (!key || !*key) return DEVICES[0];
  for (const Device& candidate : DEVICES)
    if (!strcmp(candidate.key, key)) return candidate;
  fprintf(stderr, "NULLGPU_DEVICE='%s' is not valid; expected one of:", key);
  for (const Device& candidate : DEVICES) fprintf(stderr, " %s", candidate.key);
  fprintf(stderr, "\n");
  exit(2);
}

}  // namespace

const Device& device() {
  static const Device& it = chosen();
  return it;
}

int attribute(int which) {
  const Device& d = device();
  switch (which) {
    case cudaDevAttrMaxThreadsPerBlock: return 1024;
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 48 * KiB;
    case cudaDevAttrTotalConstantMemory: return 64 * KiB;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxPitch: return 2147483647;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrClockRate: return 1980000;  // kHz
    case cudaDevAttrTextureAlignment: return 512;
    case cudaDevAttrMultiProcessorCount: return d.multiprocessors;
    case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrUnifiedAddressing: return 1;
    case cudaDevAttrMemoryClockRate: return 3201000;  // kHz
    case cudaDevAttrGlobalMemoryBusWidth: return d.bus_bits;
    case cudaDevAttrL2CacheSize: return d.l2;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return d.threads_per_multiprocessor;
    case cudaDevAttrAsyncEngineCount: return 3;
    case cudaDevAttrComputeCapabilityMajor: return d.major;
    case cudaDevAttrComputeCapabilityMinor: return d.minor;
    case cudaDevAttrStreamPrioritiesSupported: return 1;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return d.shared_per_multiprocessor;
    case cudaDevAttrManagedMemory:
    case cudaDevAttrCooperativeLaunch: return 1;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return d.shared_per_block;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case cudaDevAttrReservedSharedMemoryPerBlock: return KiB;
    case cudaDevAttrMemoryPoolsSupported: return 1;
    case cudaDevAttrClusterLaunch: return d.major >= 9;
    default: return 0;
  }
}

}  // namespace nullgpu
