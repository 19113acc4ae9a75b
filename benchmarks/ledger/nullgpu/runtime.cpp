// The CUDA runtime's questions about the device, and its last error. What stands in no file here is made by stubs.py.
#include "nullgpu.hpp"

#include <cuda.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstring>

namespace {

thread_local cudaError_t last = cudaSuccess;
constexpr int VERSION = CUDA_VERSION;

void* driver_symbol(const char* name) {
  using Look = int(const char*, void**, int, unsigned long long, void*);
  static void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  static Look* look = driver ? (Look*)dlsym(driver, "cuGetProcAddress_v2") : nullptr;
  void* symbol = nullptr;
  if (look) look(name, &symbol, VERSION, 0, nullptr);
  return symbol;
}

cudaError_t entry_point(const char* name, void** function, cudaDriverEntryPointQueryResult* result) {
  *function = driver_symbol(name);
  if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

}  // namespace

namespace nullgpu {

cudaError_t failed(cudaError_t error) { return last = error; }

static const char* numbered(cudaError_t error) {
  static thread_local char words[40];
  snprintf(words, sizeof words, "CUDA error %d", error);
  return words;
}

}  // namespace nullgpu

NULLGPU_API cudaError_t cudaGetLastError() {
  cudaError_t error = last;
  last = cudaSuccess;
  return error;
}
NULLGPU_API cudaError_t cudaPeekAtLastError() { return last; }

NULLGPU_API cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
NULLGPU_API cudaError_t cudaGetDevice(int* index) {
  *index = 0;
  return cudaSuccess;
}
NULLGPU_API cudaError_t cudaSetDevice(int index) {
  return index == 0 ? cudaSuccess : nullgpu::failed(cudaErrorInvalidDevice);
}
NULLGPU_API cudaError_t cudaSetDeviceFlags(unsigned) { return cudaSuccess; }
NULLGPU_API cudaError_t cudaGetDeviceFlags(unsigned* flags) {
  *flags = 0;
  return cudaSuccess;
}
NULLGPU_API cudaError_t cudaInitDevice(int, unsigned, unsigned) { return cudaSuccess; }
NULLGPU_API cudaError_t cudaDeviceReset() { return cudaSuccess; }
NULLGPU_API cudaError_t cudaDriverGetVersion(int* version) {
  *version = VERSION;
  return cudaSuccess;
}
NULLGPU_API cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = VERSION;
  return cudaSuccess;
}
NULLGPU_API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  *value = nullgpu::attribute(which);
  return cudaSuccess;
}

NULLGPU_API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  using nullgpu::attribute;
  const nullgpu::Device& d = nullgpu::device();
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "%s", d.name);
  p->totalGlobalMem = d.memory;
  p->major = d.major;
  p->minor = d.minor;
  p->multiProcessorCount = d.multiprocessors;
  p->sharedMemPerBlock = attribute(cudaDevAttrMaxSharedMemoryPerBlock);
  p->sharedMemPerBlockOptin = d.shared_per_block;
  p->sharedMemPerMultiprocessor = d.shared_per_multiprocessor;
  p->reservedSharedMemPerBlock = attribute(cudaDevAttrReservedSharedMemoryPerBlock);
  p->regsPerBlock = p->regsPerMultiprocessor = attribute(cudaDevAttrMaxRegistersPerBlock);
  p->warpSize = attribute(cudaDevAttrWarpSize);
  p->memPitch = attribute(cudaDevAttrMaxPitch);
  p->maxThreadsPerBlock = attribute(cudaDevAttrMaxThreadsPerBlock);
  p->maxThreadsPerMultiProcessor = d.threads_per_multiprocessor;
  p->maxBlocksPerMultiProcessor = attribute(cudaDevAttrMaxBlocksPerMultiprocessor);
  p->maxThreadsDim[0] = attribute(cudaDevAttrMaxBlockDimX);
  p->maxThreadsDim[1] = attribute(cudaDevAttrMaxBlockDimY);
  p->maxThreadsDim[2] = attribute(cudaDevAttrMaxBlockDimZ);
  p->maxGridSize[0] = attribute(cudaDevAttrMaxGridDimX);
  p->maxGridSize[1] = attribute(cudaDevAttrMaxGridDimY);
  p->maxGridSize[2] = attribute(cudaDevAttrMaxGridDimZ);
  p->totalConstMem = attribute(cudaDevAttrTotalConstantMemory);
  p->textureAlignment = attribute(cudaDevAttrTextureAlignment);
  p->l2CacheSize = d.l2;
  p->memoryBusWidth = d.bus_bits;
  p->asyncEngineCount = attribute(cudaDevAttrAsyncEngineCount);
  p->clusterLaunch = attribute(cudaDevAttrClusterLaunch);
  p->canMapHostMemory = p->concurrentKernels = p->unifiedAddressing = p->managedMemory = 1;
  p->streamPrioritiesSupported = p->cooperativeLaunch = p->memoryPoolsSupported = 1;
  return cudaSuccess;
}

NULLGPU_API cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int) {
  snprintf(text, length, "0000:0A:00.0");
  return cudaSuccess;
}
NULLGPU_API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
NULLGPU_API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
NULLGPU_API cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) {
  if (lowest) *lowest = 0;
  if (highest) *highest = -5;
  return cudaSuccess;
}
NULLGPU_API cudaError_t cudaProfilerStart() { return cudaSuccess; }
NULLGPU_API cudaError_t cudaProfilerStop() { return cudaSuccess; }

NULLGPU_API cudaError_t cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long,
                                                cudaDriverEntryPointQueryResult* result) {
  return entry_point(name, function, result);
}
NULLGPU_API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                                         unsigned long long, cudaDriverEntryPointQueryResult* result) {
  return entry_point(name, function, result);
}

NULLGPU_API const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
    case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    default: return nullgpu::numbered(error);
  }
}
NULLGPU_API const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    case cudaErrorNotSupported: return "the null GPU does not know this call (see the records named 'unknown')";
    default: return nullgpu::numbered(error);
  }
}
