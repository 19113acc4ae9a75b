// Device memory: address space that the machine maps page by page when somebody writes there. A model of 150 GB costs
// nothing, because no kernel writes. Copies of more than 1 MiB inside the device, and such fills, are recorded only.
#include "nullgpu.hpp"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

using nullgpu::failed;
using nullgpu::record;
using nullgpu::text;

namespace {

constexpr std::size_t PAGE = 4096;
constexpr std::size_t GUARD = 2u << 20;  // libraries round reads up past the end of a buffer
constexpr std::size_t LARGEST_REAL_COPY = 1u << 20;

std::mutex mutex;
std::size_t used = 0;

// what of the address space belongs to the device
std::map<char*, std::size_t>& allocations() {
  static auto* map = new std::map<char*, std::size_t>;
  return *map;
}

void* map_pages(std::size_t bytes) {
  void* address =
      mmap(nullptr, bytes + GUARD, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) return nullptr;
  madvise(address, bytes, MADV_NOHUGEPAGE);
  allocations()[(char*)address] = bytes;
  return address;
}

std::map<char*, std::size_t>& pinned() {
  static auto* map = new std::map<char*, std::size_t>;
  return *map;
}

bool inside(const std::map<char*, std::size_t>& ranges, const void* pointer, std::size_t slack) {
  std::lock_guard<std::mutex> lock(mutex);
  auto next = ranges.upper_bound((char*)pointer);
  if (next == ranges.begin()) return false;
  --next;
  return (char*)pointer < next->first + next->second + slack;
}

bool on_device(const void* pointer) { return inside(allocations(), pointer, GUARD); }
bool is_pinned(const void* pointer) { return inside(pinned(), pointer, 0); }

cudaError_t allocate(void** pointer, std::size_t bytes) {
  if (nullgpu::capturing())
    if (cudaError_t error = nullgpu::forbidden_in_capture("cudaMalloc")) return error;
  std::lock_guard<std::mutex> lock(mutex);
  std::size_t rounded = bytes ? (bytes + PAGE - 1) / PAGE * PAGE : PAGE;
  if (used + rounded > nullgpu::device().memory) {
    record("refused", "cudaMalloc", text("bytes=%zu used=%zu reason=out_of_memory", bytes, used));
    return failed(cudaErrorMemoryAllocation);
  }
  void* address = map_pages(rounded);
  if (!address) return failed(cudaErrorMemoryAllocation);
  used += rounded;
  *pointer = address;
  record("malloc", "cudaMalloc", text("bytes=%zu", bytes));
  return cudaSuccess;
}

cudaError_t release(void* pointer) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = allocations().find((char*)pointer);
  if (found != allocations().end()) {
    munmap(pointer, found->second + GUARD);
    used -= found->second;
    allocations().erase(found);
  }
  record("free", "cudaFree");
  return cudaSuccess;
}

cudaError_t copy(void* to, const void* from, std::size_t bytes, bool waits, const void* stream) {
  bool to_device = on_device(to), from_device = on_device(from);
  const char* kind = to_device ? (from_device ? "D2D" : "H2D") : (from_device ? "D2H" : "H2H");
  const void* host = to_device ? from : to;
  bool pageable = to_device != from_device && !is_pinned(host);
  record("memcpy", kind,
         text("bytes=%zu %s%s stream=%p", bytes, waits ? "sync" : "async", pageable ? " pageable" : "", stream));
  if (waits)
    if (cudaError_t error = nullgpu::forbidden_in_capture("cudaMemcpy")) return error;
  if (bytes <= LARGEST_REAL_COPY || !(to_device && from_device)) memcpy(to, from, bytes);
  return cudaSuccess;
}

}  // namespace

namespace nullgpu {

void* reserve(std::size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  return map_pages(bytes);
}
void release_addresses(void* pointer) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = allocations().find((char*)pointer);
  if (found == allocations().end()) return;
  munmap(pointer, found->second + GUARD);
  allocations().erase(found);
}
bool take(std::size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  if (used + bytes > device().memory) return false;
  used += bytes;
  return true;
}
void give_back(std::size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  used -= bytes;
}

}  // namespace nullgpu

NULLGPU_API cudaError_t cudaMalloc(void** pointer, size_t bytes) { return allocate(pointer, bytes); }
NULLGPU_API cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t) { return allocate(pointer, bytes); }
NULLGPU_API cudaError_t cudaFree(void* pointer) { return release(pointer); }
NULLGPU_API cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return release(pointer); }

NULLGPU_API cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  if (posix_memalign(pointer, PAGE, bytes ? bytes : 1)) return failed(cudaErrorMemoryAllocation);
  std::lock_guard<std::mutex> lock(mutex);
  pinned()[(char*)*pointer] = bytes;
  return cudaSuccess;
}
NULLGPU_API cudaError_t cudaMallocHost(void** pointer, size_t bytes) { return cudaHostAlloc(pointer, bytes, 0); }
NULLGPU_API cudaError_t cudaFreeHost(void* pointer) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    pinned().erase((char*)pointer);
  }
  free(pointer);
  return cudaSuccess;
}
NULLGPU_API cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  std::lock_guard<std::mutex> lock(mutex);
  pinned()[(char*)pointer] = bytes;
  return cudaSuccess;
}
NULLGPU_API cudaError_t cudaHostUnregister(void* pointer) {
  std::lock_guard<std::mutex> lock(mutex);
  pinned().erase((char*)pointer);
  return cudaSuccess;
}
NULLGPU_API cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  *device = host;
  return cudaSuccess;
}

NULLGPU_API cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  *total = nullgpu::device().memory;
  *free_bytes = *total - used;
  return cudaSuccess;
}

NULLGPU_API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  return copy(to, from, bytes, true, nullptr);
}
NULLGPU_API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return copy(to, from, bytes, false, stream);
}
NULLGPU_API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  return copy(to, from, bytes, false, stream);
}
NULLGPU_API cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                          size_t height, cudaMemcpyKind, cudaStream_t stream) {
  for (size_t row = 0; row < height; ++row)
    if (cudaError_t error =
            copy((char*)to + row * to_pitch, (const char*)from + row * from_pitch, width, false, stream))
      return error;
  return cudaSuccess;
}
NULLGPU_API cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t bytes, size_t, cudaMemcpyKind) {
  record("memcpy", "H2D", text("bytes=%zu symbol", bytes));
  return cudaSuccess;
}

NULLGPU_API cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  record("memset", "memset", text("bytes=%zu stream=%p", bytes, (void*)stream));
  if (bytes <= LARGEST_REAL_COPY) memset(to, value, bytes);
  return cudaSuccess;
}
NULLGPU_API cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  return cudaMemsetAsync(to, value, bytes, nullptr);
}

NULLGPU_API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  bool here = on_device(pointer);
  memset(attributes, 0, sizeof *attributes);
  attributes->type = here ? cudaMemoryTypeDevice : is_pinned(pointer) ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  attributes->devicePointer = (void*)pointer;
  attributes->hostPointer = here ? nullptr : (void*)pointer;
  return cudaSuccess;
}

NULLGPU_API cudaError_t cudaGetSymbolAddress(void** pointer, const void*) {
  static void* anywhere = calloc(1, 1 << 16);
  *pointer = anywhere;
  return cudaSuccess;
}

// the pools of cudaMallocAsync: one, without limits
NULLGPU_API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
  *pool = (cudaMemPool_t)1;
  return cudaSuccess;
}
NULLGPU_API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* value) {
  memset(value, 0, 8);
  return cudaSuccess;
}
NULLGPU_API cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
NULLGPU_API cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) { return cudaSuccess; }
NULLGPU_API cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }
