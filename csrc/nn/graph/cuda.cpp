// Capture of decoding steps as CUDA graphs. The Python twin is girih/models/graph.py.
#include <ATen/autocast_mode.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>

#include <exception>
#include <mutex>

#include "../decoding.h"

namespace girih::nn {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

// The capture stream and the memory pool of graphs that run one after the other on one stream. No data in the
// pool is read after the graph that wrote it has run.
struct CapturePool {
  c10::cuda::CUDAStream stream;  // graphs are captured on this stream; nothing else runs on it
  at::MempoolId_t pool;          // memory of all graphs
  std::shared_ptr<at::cuda::CUDAGraph> first_graph{};  // a graph that keeps the pool alive
};

// Begins a capture. A generator under capture serves no other stream, and no stream at all if the capture
// fails. A step draws no random values, so a copy of the device's generator is captured instead. The lock
// excludes threads that draw random values.
void begin(at::cuda::CUDAGraph& graph, const CapturePool& capture_pool) {
  auto generator = at::cuda::detail::getDefaultCUDAGenerator(capture_pool.stream.device_index());
  const std::lock_guard<std::mutex> lock(generator.mutex());
  const auto own = generator.graphsafe_get_state();
  const auto copy = generator.clone();
  generator.graphsafe_set_state(copy);
  try {
    graph.capture_begin(capture_pool.pool, cudaStreamCaptureModeThreadLocal);
  } catch (...) {
    generator.graphsafe_set_state(own);
    throw;
  }
  generator.graphsafe_set_state(own);
}

void record(at::cuda::CUDAGraph& graph, const std::function<void()>& work, const CapturePool& capture_pool) {
  const c10::cuda::CUDAStreamGuard guard(capture_pool.stream);
  std::exception_ptr error;
  try {
    begin(graph, capture_pool);
    try {
      work();
    } catch (...) {
      error = std::current_exception();
    }
    graph.capture_end();
  } catch (...) {
    if (!error) error = std::current_exception();
    try {
      const auto device = capture_pool.stream.device_index();
      allocator::endAllocateToPool(device, capture_pool.pool);
      allocator::releasePool(device, capture_pool.pool);
    } catch (const c10::Error&) {  // the capture has not begun
    }
  }
  if (error) std::rethrow_exception(error);
}

std::shared_ptr<at::cuda::CUDAGraph> capture_graph(const std::function<void()>& work,
                                                   const CapturePool& capture_pool) {
  const auto graph = std::make_shared<at::cuda::CUDAGraph>();
  record(*graph, work, capture_pool);
  return graph;
}

// device: the current device. One pool for all graphs, because a graph's own pool would hold its memory until
// PyTorch releases all free memory.
CapturePool make_shared(c10::DeviceIndex device) {
  cudaStream_t own{};
  C10_CUDA_CHECK(cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking));
  CapturePool new_pool{c10::cuda::getStreamFromExternal(own, device), at::cuda::graph_pool_handle()};
  new_pool.first_graph = capture_graph([] { at::zeros({1}, at::kCUDA); }, new_pool);
  return new_pool;
}

class CudaGraphRecorder final : public GraphRecorder {
 public:
  std::function<void()> record(const std::function<void()>& work) override {
    // Never destroyed: at exit the driver may already be unloaded.
    static auto& mutex = *new std::mutex;
    static auto& all = *new std::map<std::pair<c10::DeviceIndex, c10::StreamId>, CapturePool>;
    const c10::cuda::CUDAGuard guard(device_);
    const std::pair key(device_, c10::cuda::getCurrentCUDAStream().id());  // graphs replay on this stream
    const std::lock_guard<std::mutex> lock(mutex);                         // one capture at a time
    auto found = all.find(key);
    if (found == all.end()) found = all.emplace(key, make_shared(device_)).first;
    try {
      return [graph = capture_graph(work, found->second)] { graph->replay(); };
    } catch (...) {
      all.erase(found);  // the next capture allocates a new pool
      throw;
    }
  }

  explicit CudaGraphRecorder(c10::DeviceIndex device) : device_(device) {}

 private:
  c10::DeviceIndex device_;
};

}  // namespace

std::unique_ptr<GraphRecorder> make_recorder(const Tensor& ids) {
  // Autocast casts weights again for each token, into new tensors.
  if (!ids.is_cuda() || ids.numel() == 0 || at::autocast::is_autocast_enabled(at::kCUDA)) return nullptr;
  const c10::cuda::CUDAGuard guard(ids.device());
  if (c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) return nullptr;
  return std::make_unique<CudaGraphRecorder>(ids.get_device());
}

}  // namespace girih::nn
