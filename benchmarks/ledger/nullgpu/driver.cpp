// libcuda.so.1: what Triton, NVRTC's users and torch ask of the driver. stubs.py adds the rest of cuda.h.
// Declared here without cuda.h, because the generated stubs have no arguments.
#include "nullgpu.hpp"

#include <dlfcn.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstring>
#include <mutex>
#include <unordered_map>

typedef int CUresult;
constexpr CUresult OK = 0, OUT_OF_MEMORY = 2, NOT_FOUND = 500;

namespace {

std::mutex mutex;
long handles = 0x1000;

std::unordered_map<void*, std::string>& functions() {
  static auto* map = new std::unordered_map<void*, std::string>;
  return *map;
}

// memory without an address, by its handle: bytes
std::unordered_map<unsigned long long, size_t>& blocks() {
  static auto* map = new std::unordered_map<unsigned long long, size_t>;
  return *map;
}

void* fresh() { return (void*)(handles += 16); }
void* const CONTEXT = (void*)0x51;

CUresult launch(void* function, dim3 grid, dim3 block, size_t shared, const void* stream) {
  std::string name;
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = functions().find(function);
    name = found == functions().end() ? "unregistered" : found->second;
  }
  return nullgpu::launch(name, grid, block, shared, stream);
}

// the newest form of a function, as libraries of CUDA 13 ask for; Transformer Engine asks for the first of this one
void* symbol(const std::string& name) {
  static void* self = dlopen("libcuda.so.1", RTLD_NOW);
  void* newest = name == "cuStreamGetCtx" ? nullptr : dlsym(self, (name + "_v2").c_str());
  return newest ? newest : dlsym(self, name.c_str());
}

}  // namespace

#define DOES_NOTHING(name) \
  NULLGPU_API CUresult name(...) { return OK; }

NULLGPU_API CUresult cuInit(unsigned) { return OK; }
NULLGPU_API CUresult cuDriverGetVersion(int* version) { return cudaDriverGetVersion(version); }
NULLGPU_API CUresult cuDeviceGetCount(int* count) { return cudaGetDeviceCount(count); }
NULLGPU_API CUresult cuDeviceGet(int* device, int) { return cudaGetDevice(device); }
NULLGPU_API CUresult cuDeviceGetName(char* name, int length, int) {
  snprintf(name, length, "%s", nullgpu::device().name);
  return OK;
}
NULLGPU_API CUresult cuDeviceGetAttribute(int* value, int which, int) {
  *value = nullgpu::attribute(which);
  return OK;
}
NULLGPU_API CUresult cuDeviceTotalMem_v2(size_t* bytes, int) {
  *bytes = nullgpu::device().memory;
  return OK;
}
NULLGPU_API CUresult cuDeviceComputeCapability(int* major, int* minor, int) {
  *major = nullgpu::device().major;
  *minor = nullgpu::device().minor;
  return OK;
}
NULLGPU_API CUresult cuDevicePrimaryCtxRetain(void** context, int) {
  *context = CONTEXT;
  return OK;
}
NULLGPU_API CUresult cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return OK;
}
NULLGPU_API CUresult cuCtxGetCurrent(void** context) {
  *context = CONTEXT;
  return OK;
}
NULLGPU_API CUresult cuStreamGetCtx(void*, void** context) { return cuCtxGetCurrent(context); }
NULLGPU_API CUresult cuCtxGetDevice(int* device) { return cudaGetDevice(device); }
NULLGPU_API CUresult cuCtxGetLimit(size_t* value, int) {
  *value = 0;
  return OK;
}
DOES_NOTHING(cuCtxSetCurrent)
DOES_NOTHING(cuCtxPushCurrent_v2)
DOES_NOTHING(cuCtxPopCurrent_v2)
DOES_NOTHING(cuCtxSetLimit)
DOES_NOTHING(cuCtxSynchronize)
DOES_NOTHING(cuDevicePrimaryCtxRelease_v2)
DOES_NOTHING(cuDevicePrimaryCtxSetFlags_v2)

NULLGPU_API CUresult cuModuleLoadData(void** module, const void*) {
  *module = fresh();
  return OK;
}
NULLGPU_API CUresult cuModuleLoadDataEx(void** module, const void* image, unsigned, void*, void**) {
  return cuModuleLoadData(module, image);
}
NULLGPU_API CUresult cuModuleLoad(void** module, const char*) { return cuModuleLoadData(module, nullptr); }
NULLGPU_API CUresult cuLibraryLoadData(void** library, const void* image, void*, void**, unsigned, void*, void**,
                                       unsigned) {
  return cuModuleLoadData(library, image);
}
NULLGPU_API CUresult cuModuleGetFunction(void** function, void*, const char* name) {
  std::lock_guard<std::mutex> lock(mutex);
  *function = fresh();
  functions()[*function] = name;
  return OK;
}
NULLGPU_API CUresult cuLibraryGetKernel(void** kernel, void* library, const char* name) {
  return cuModuleGetFunction(kernel, library, name);
}
NULLGPU_API CUresult cuKernelGetFunction(void** function, void* kernel) {
  *function = kernel;
  return OK;
}
DOES_NOTHING(cuModuleUnload)
DOES_NOTHING(cuLibraryUnload)
DOES_NOTHING(cuFuncSetAttribute)
DOES_NOTHING(cuFuncSetCacheConfig)
DOES_NOTHING(cuTensorMapEncodeTiled)
DOES_NOTHING(cuTensorMapReplaceAddress)

NULLGPU_API CUresult cuFuncGetAttribute(int* value, int which, void*) {
  constexpr int MAX_THREADS_PER_BLOCK = 0, NUM_REGS = 4;
  *value = which == NUM_REGS ? 32 : which == MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return OK;
}
NULLGPU_API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void*, int, size_t) {
  *blocks = 2;
  return OK;
}
NULLGPU_API CUresult cuOccupancyMaxActiveClusters(int* clusters, void*, void*) {
  *clusters = nullgpu::device().multiprocessors / 2;
  return OK;
}

NULLGPU_API CUresult cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                    unsigned bz, unsigned shared, void* stream, void**, void**) {
  return launch(function, dim3{gx, gy, gz}, dim3{bx, by, bz}, shared, stream);
}
NULLGPU_API CUresult cuLaunchCooperativeKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                               unsigned by, unsigned bz, unsigned shared, void* stream, void**) {
  return launch(function, dim3{gx, gy, gz}, dim3{bx, by, bz}, shared, stream);
}
struct LaunchConfig {  // CUlaunchConfig
  unsigned gx, gy, gz, bx, by, bz, shared;
  void* stream;
};
NULLGPU_API CUresult cuLaunchKernelEx(const LaunchConfig* c, void* function, void**, void**) {
  return launch(function, dim3{c->gx, c->gy, c->gz}, dim3{c->bx, c->by, c->bz}, c->shared, c->stream);
}

NULLGPU_API CUresult cuPointerGetAttribute(void* value, int which, unsigned long long pointer) {
  constexpr int DEVICE_POINTER = 3, DEVICE_ORDINAL = 9;
  if (which == DEVICE_POINTER)
    memcpy(value, &pointer, sizeof pointer);
  else if (which == DEVICE_ORDINAL)
    *(int*)value = 0;
  else
    memset(value, 0, 4);
  return OK;
}
NULLGPU_API CUresult cuStreamSynchronize(void* stream) { return cudaStreamSynchronize((cudaStream_t)stream); }
NULLGPU_API CUresult cuMemGetInfo_v2(size_t* free_bytes, size_t* total) { return cudaMemGetInfo(free_bytes, total); }

// memory of expandable segments: pieces of 2 MiB that are mapped into reserved addresses
NULLGPU_API CUresult cuMemGetAllocationGranularity(size_t* bytes, const void*, int) {
  *bytes = 2u << 20;
  return OK;
}
NULLGPU_API CUresult cuMemAddressReserve(void** pointer, size_t bytes, size_t, void*, unsigned long long) {
  *pointer = nullgpu::reserve(bytes);
  return *pointer ? OK : OUT_OF_MEMORY;
}
NULLGPU_API CUresult cuMemAddressFree(void* pointer, size_t) {
  nullgpu::release_addresses(pointer);
  return OK;
}
NULLGPU_API CUresult cuMemCreate(unsigned long long* handle, size_t bytes, const void*, unsigned long long) {
  if (!nullgpu::take(bytes)) {
    nullgpu::record("refused", "cuMemCreate", nullgpu::text("bytes=%zu reason=out_of_memory", bytes));
    return OUT_OF_MEMORY;
  }
  std::lock_guard<std::mutex> lock(mutex);
  *handle = (unsigned long long)fresh();
  blocks()[*handle] = bytes;
  return OK;
}
NULLGPU_API CUresult cuMemRelease(unsigned long long handle) {
  std::lock_guard<std::mutex> lock(mutex);
  nullgpu::give_back(blocks()[handle]);
  blocks().erase(handle);
  return OK;
}
NULLGPU_API CUresult cuMemUnmap(void* pointer, size_t bytes) {
  madvise(pointer, bytes, MADV_DONTNEED);
  return OK;
}
DOES_NOTHING(cuMemMap)
DOES_NOTHING(cuMemSetAccess)

NULLGPU_API CUresult cuGetErrorString(int error, const char** text) {
  *text = cudaGetErrorString((cudaError_t)error);
  return OK;
}
NULLGPU_API CUresult cuGetErrorName(int error, const char** text) {
  *text = cudaGetErrorName((cudaError_t)error);
  return OK;
}
NULLGPU_API CUresult cuGetProcAddress_v2(const char* name, void** function, int, unsigned long long, void*) {
  *function = symbol(name);
  return *function ? OK : NOT_FOUND;
}
NULLGPU_API CUresult cuGetExportTable(void** table, const void*) {
  *table = nullptr;
  return NOT_FOUND;
}
