// What the parts of the null GPU know of each other. The folder's README explains the whole.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>

#define NULLGPU_API extern "C" __attribute__((visibility("default")))

namespace nullgpu {

// ---- records.cpp: the list of all that was asked of the GPU
void record(const char* what, const std::string& name, const std::string& details = "");
bool recording();
double now();  // seconds of the monotonic clock
std::string text(const char* format, ...) __attribute__((format(printf, 1, 2)));

// ---- device.cpp: the GPU that is played
struct Device {
  const char* key;     // the value of NULLGPU_DEVICE that chooses it
  const char* name;    // as the driver reports it
  int major, minor;    // compute capability
  std::size_t memory;  // bytes
  int multiprocessors, threads_per_multiprocessor;
  int shared_per_block, shared_per_multiprocessor;  // bytes of shared memory, the former by opt-in
  int l2, bus_bits;
  int capability() const { return 10 * major + minor; }
};
const Device& device();
int attribute(int which);  // by the numbers of cudaDeviceAttr, which are CUdevice_attribute's too

// ---- runtime.cpp: errors as CUDA keeps them
cudaError_t failed(cudaError_t error);  // remembers an error for cudaGetLastError

// ---- memory.cpp: addresses without memory, and memory without addresses, which the driver puts together
void* reserve(std::size_t bytes);
void release_addresses(void* pointer);
bool take(std::size_t bytes);  // false: the device has not as much left
void give_back(std::size_t bytes);

// ---- streams.cpp: what a stream under capture forbids
cudaError_t forbidden_in_capture(const char* call);  // cudaSuccess, or the error of a call that would wait for the GPU
bool capturing();
void captured_kernel();  // counts one more node of the graph that is captured

// ---- kernels.cpp
cudaError_t launch(const std::string& name, dim3 grid, dim3 block, std::size_t shared, const void* stream);

}  // namespace nullgpu
