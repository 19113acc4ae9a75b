// Streams, events and CUDA graphs. Work ends when it is asked for; a call that waits while a stream is captured fails
// as CUDA fails.
#include "nullgpu.hpp"

#include <atomic>

using nullgpu::failed;
using nullgpu::record;
using nullgpu::text;

namespace {

struct Event {
  double seconds = 0;
};

struct Graph {
  long kernels = 0;
};

std::atomic<long> streams{16};
thread_local Graph* captured = nullptr;
thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;

cudaStreamCaptureStatus status() { return captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone; }

}  // namespace

namespace nullgpu {

bool capturing() { return captured != nullptr; }

void captured_kernel() {
  if (captured) ++captured->kernels;
}

// cudaMalloc is allowed while the thread relaxes its mode, as torch does around the allocator; waiting never is
cudaError_t forbidden_in_capture(const char* call) {
  if (!captured) return cudaSuccess;
  if (std::string(call) == "cudaMalloc" && mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  record("refused", call, "reason=stream_capture");
  return failed(cudaErrorStreamCaptureUnsupported);
}

}  // namespace nullgpu

using nullgpu::forbidden_in_capture;

NULLGPU_API cudaError_t cudaDeviceSynchronize() {
  record("sync", "cudaDeviceSynchronize");
  return forbidden_in_capture("cudaDeviceSynchronize");
}

NULLGPU_API cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = (cudaStream_t)(streams += 16);
  return cudaSuccess;
}
NULLGPU_API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return cudaStreamCreate(stream); }
NULLGPU_API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  return cudaStreamCreate(stream);
}
NULLGPU_API cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
NULLGPU_API cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}
NULLGPU_API cudaError_t cudaStreamQuery(cudaStream_t) { return forbidden_in_capture("cudaStreamQuery"); }
NULLGPU_API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  record("sync", "cudaStreamSynchronize", text("stream=%p", (void*)stream));
  return forbidden_in_capture("cudaStreamSynchronize");
}
NULLGPU_API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t, unsigned) {
  record("event", "wait", text("stream=%p", (void*)stream));
  return cudaSuccess;
}

NULLGPU_API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* out) {
  *out = status();
  return cudaSuccess;
}
NULLGPU_API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* out, unsigned long long* id,
                                                 cudaGraph_t* graph, const cudaGraphNode_t** nodes,
                                                 const cudaGraphEdgeData** edges, size_t* count) {
  *out = status();
  if (id) *id = captured ? (unsigned long long)(size_t)captured : 0;
  if (graph) *graph = (cudaGraph_t)captured;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaSuccess;
}
NULLGPU_API cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode wanted) {
  if (captured) return failed(cudaErrorIllegalState);
  record("graph", "begin");
  mode = wanted;
  captured = new Graph;
  return cudaSuccess;
}
NULLGPU_API cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  if (!captured) return failed(cudaErrorIllegalState);
  record("graph", "end", text("kernels=%ld", captured->kernels));
  *graph = (cudaGraph_t)captured;
  captured = nullptr;
  return cudaSuccess;
}
NULLGPU_API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* wanted) {
  std::swap(mode, *wanted);
  return cudaSuccess;
}
// graphs live as long as the process: an instance is its graph
NULLGPU_API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* instance, cudaGraph_t graph,
                                                      unsigned long long) {
  *instance = (cudaGraphExec_t)graph;
  return cudaSuccess;
}
NULLGPU_API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = ((Graph*)graph)->kernels;
  return cudaSuccess;
}
NULLGPU_API cudaError_t cudaGraphLaunch(cudaGraphExec_t instance, cudaStream_t stream) {
  record("graph", "launch", text("kernels=%ld stream=%p", ((Graph*)instance)->kernels, (void*)stream));
  return cudaSuccess;
}
NULLGPU_API cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }
NULLGPU_API cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
NULLGPU_API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }

NULLGPU_API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = (cudaEvent_t) new Event;
  return cudaSuccess;
}
NULLGPU_API cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
NULLGPU_API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete (Event*)event;
  return cudaSuccess;
}
NULLGPU_API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  ((Event*)event)->seconds = nullgpu::now();
  record("event", "record", text("stream=%p", (void*)stream));
  return cudaSuccess;
}
NULLGPU_API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}
NULLGPU_API cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
NULLGPU_API cudaError_t cudaEventSynchronize(cudaEvent_t) {
  record("sync", "cudaEventSynchronize");
  return forbidden_in_capture("cudaEventSynchronize");
}
// the time between two calls of the host: says nothing about a GPU
NULLGPU_API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  *milliseconds = 1e3 * (((Event*)end)->seconds - ((Event*)start)->seconds);
  return cudaSuccess;
}
NULLGPU_API cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) {
  function(data);
  return cudaSuccess;
}
