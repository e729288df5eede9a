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
struct Shared {
  c10::cuda::CUDAStream stream;  // graphs are captured on this stream; nothing else runs on it
  at::MempoolId_t pool;          // memory of all graphs
  std::shared_ptr<at::cuda::CUDAGraph> keeper{};  // a graph that keeps the pool alive
};

// Begins a capture. A generator under capture serves no other stream, and no stream at all if the capture
// fails. A step draws no random values, so a copy of the device's generator is captured instead. The lock
// excludes threads that draw random values.
void begin(at::cuda::CUDAGraph& graph, const Shared& shared) {
  auto numbers = at::cuda::detail::getDefaultCUDAGenerator(shared.stream.device_index());
  const std::lock_guard<std::mutex> lock(numbers.mutex());
  const auto own = numbers.graphsafe_get_state();
  const auto copy = numbers.clone();
  numbers.graphsafe_set_state(copy);
  try {
    graph.capture_begin(shared.pool, cudaStreamCaptureModeThreadLocal);
  } catch (...) {
    numbers.graphsafe_set_state(own);
    throw;
  }
  numbers.graphsafe_set_state(own);
}

void record(at::cuda::CUDAGraph& graph, const std::function<void()>& work, const Shared& shared) {
  const c10::cuda::CUDAStreamGuard guard(shared.stream);
  std::exception_ptr failed;
  try {
    begin(graph, shared);
    try {
      work();
    } catch (...) {
      failed = std::current_exception();
    }
    graph.capture_end();
  } catch (...) {
    if (!failed) failed = std::current_exception();
    try {
      const auto device = shared.stream.device_index();
      allocator::endAllocateToPool(device, shared.pool);
      allocator::releasePool(device, shared.pool);
    } catch (const c10::Error&) {  // the capture has not begun
    }
  }
  if (failed) std::rethrow_exception(failed);
}

std::shared_ptr<at::cuda::CUDAGraph> graph_of(const std::function<void()>& work, const Shared& shared) {
  const auto graph = std::make_shared<at::cuda::CUDAGraph>();
  record(*graph, work, shared);
  return graph;
}

// device: the current device. One pool for all graphs, because a graph's own pool would hold its memory until
// PyTorch releases all free memory.
Shared make_shared(c10::DeviceIndex device) {
  cudaStream_t own{};
  C10_CUDA_CHECK(cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking));
  Shared made{c10::cuda::getStreamFromExternal(own, device), at::cuda::graph_pool_handle()};
  made.keeper = graph_of([] { at::zeros({1}, at::kCUDA); }, made);
  return made;
}

class Graphs final : public Recorder {
 public:
  std::function<void()> record(const std::function<void()>& work) override {
    // Never destroyed: at exit the driver may already be unloaded.
    static auto& mutex = *new std::mutex;
    static auto& all = *new std::map<std::pair<c10::DeviceIndex, c10::StreamId>, Shared>;
    const c10::cuda::CUDAGuard guard(device_);
    const std::pair key(device_, c10::cuda::getCurrentCUDAStream().id());  // graphs replay on this stream
    const std::lock_guard<std::mutex> lock(mutex);                         // one capture at a time
    auto found = all.find(key);
    if (found == all.end()) found = all.emplace(key, make_shared(device_)).first;
    try {
      return [graph = graph_of(work, found->second)] { graph->replay(); };
    } catch (...) {
      all.erase(found);  // the next capture allocates a new pool
      throw;
    }
  }

  explicit Graphs(c10::DeviceIndex device) : device_(device) {}

 private:
  c10::DeviceIndex device_;
};

}  // namespace

std::unique_ptr<Recorder> recorder_for(const Tensor& ids) {
  // Autocast casts weights again for each token, into new tensors.
  if (!ids.is_cuda() || ids.numel() == 0 || at::autocast::is_autocast_enabled(at::kCUDA)) return nullptr;
  const c10::cuda::CUDAGuard guard(ids.device());
  if (c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) return nullptr;
  return std::make_unique<Graphs>(ids.get_device());
}

}  // namespace girih::nn
