// Kernels that nvcc compiled into libraries: they register by name, and a launch looks the name up.
#include "nullgpu.hpp"

#include <cstring>
#include <mutex>
#include <unordered_map>

using nullgpu::failed;
using nullgpu::record;
using nullgpu::text;

namespace {

std::mutex mutex;

std::unordered_map<const void*, std::string>& names() {
  static auto* map = new std::unordered_map<const void*, std::string>;
  return *map;
}

struct Configuration {
  dim3 grid, block;
  size_t shared;
  void* stream;
};
thread_local Configuration pushed;

cudaError_t launch_registered(const void* function, dim3 grid, dim3 block, size_t shared, const void* stream) {
  std::string name;
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = names().find(function);
    name = found == names().end() ? "unregistered" : found->second;
  }
  return nullgpu::launch(name, grid, block, shared, stream);
}

}  // namespace

namespace nullgpu {

cudaError_t launch(const std::string& name, dim3 grid, dim3 block, std::size_t shared, const void* stream) {
  size_t threads = (size_t)block.x * block.y * block.z;
  bool empty = !grid.x || !grid.y || !grid.z || !threads;
  if (empty || threads > 1024 || grid.y > 65535 || grid.z > 65535 || (int)shared > device().shared_per_block) {
    record("refused", name,
           text("grid=%u,%u,%u block=%u,%u,%u shared=%zu reason=launch_configuration", grid.x, grid.y, grid.z, block.x,
                block.y, block.z, shared));
    return failed(cudaErrorInvalidConfiguration);
  }
  captured_kernel();
  if (recording())
    record("kernel", name,
           text("grid=%u,%u,%u block=%u,%u,%u shared=%zu stream=%p%s", grid.x, grid.y, grid.z, block.x, block.y,
                block.z, shared, stream, capturing() ? " captured" : ""));
  return cudaSuccess;
}

}  // namespace nullgpu

NULLGPU_API void** __cudaRegisterFatBinary(void*) {
  static void* handle[4];
  return handle;
}
NULLGPU_API void __cudaRegisterFatBinaryEnd(void**) {}
NULLGPU_API void __cudaUnregisterFatBinary(void**) {}
NULLGPU_API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
NULLGPU_API void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*,
                                        void*, int*) {
  std::lock_guard<std::mutex> lock(mutex);
  names()[host] = name;
}
NULLGPU_API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  pushed = {grid, block, shared, stream};
  return 0;
}
NULLGPU_API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = pushed.grid;
  *block = pushed.block;
  *shared = pushed.shared;
  *(void**)stream = pushed.stream;
  return cudaSuccess;
}
NULLGPU_API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}
NULLGPU_API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void**, size_t shared,
                                           cudaStream_t stream) {
  return launch_registered(kernel, grid, block, shared, stream);
}
NULLGPU_API cudaError_t __cudaLaunchKernel_ptsz(cudaKernel_t kernel, dim3 grid, dim3 block, void**, size_t shared,
                                                cudaStream_t stream) {
  return launch_registered(kernel, grid, block, shared, stream);
}
NULLGPU_API cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void**, size_t shared,
                                         cudaStream_t stream) {
  return launch_registered(function, grid, block, shared, stream);
}
NULLGPU_API cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block, void**, size_t shared,
                                                    cudaStream_t stream) {
  return launch_registered(function, grid, block, shared, stream);
}
NULLGPU_API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* function, void**) {
  return launch_registered(function, c->gridDim, c->blockDim, c->dynamicSmemBytes, c->stream);
}

NULLGPU_API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->maxDynamicSharedSizeBytes = nullgpu::device().shared_per_block;
  int capability = nullgpu::device().capability();
  attributes->binaryVersion = attributes->ptxVersion = capability == 89 ? 86 : capability;  // torch has no code for 8.9
  return cudaSuccess;
}
NULLGPU_API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
NULLGPU_API cudaError_t cudaFuncSetCacheConfig(const void*, cudaFuncCache) { return cudaSuccess; }
NULLGPU_API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t,
                                                                               unsigned) {
  *blocks = 2;
  return cudaSuccess;
}
NULLGPU_API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}
NULLGPU_API cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void*, const cudaLaunchConfig_t*) {
  *clusters = nullgpu::device().multiprocessors / 2;
  return cudaSuccess;
}
