// Times each way to run an NVFP4 linear layer with few rows on Hopper, for linear_forms.py.
//
//   linear_forms [rows n k]...
//
// The first line of its output is the bandwidth of copies in TB/s. Each further line is the sizes,
// the microseconds of a launch, and the name of the form. A form runs in a CUDA graph, one launch
// after the other, each with weights of its own, so that no weight is in the L2 cache.
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

// It comes whole, because its launches take neither teams nor ranks.
#include "cuda/gemm/linear_few.cuh"
#include "cuda/gemm/linear_row.cuh"
#include "cuda/gemm/linear_sm90.cu"

namespace nvfp4 {
namespace {

using T = __nv_bfloat16;

constexpr int64_t kAllBytes = 640 << 20;  // weights of a graph: many times the L2 cache
constexpr int kMinLaunches = 4, kMaxLaunches = 64, kWarmups = 3, kRepeats = 15;

void Check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}

struct Size {
  int64_t rows, n, k;
};

struct Candidate {
  std::string name;
  std::function<cudaError_t(cudaStream_t, const ExpertGemm&)> launch;
};

template <int kTeams>
cudaError_t LaunchSm90(cudaStream_t stream, const ExpertGemm& gemm, int64_t rows, int32_t ranks) {
  const PackedLayer<T> layer = {gemm, MakeTileConstants<T>()};
  return LaunchTeams<T, kTeams>(stream, layer, rows, gemm.columns, gemm.k, ranks);
}

std::vector<Candidate> CandidatesOf(const Size& size) {
  std::vector<Candidate> candidates;
  const int64_t rows = size.rows;
  const auto add = [&](std::string name, auto launch) {
    candidates.push_back({std::move(name), std::move(launch)});
  };
  if (rows == 1) {
    add("linear_row", [](cudaStream_t stream, const ExpertGemm& gemm) {
      return LaunchLinearRow(stream, gemm, nullptr, /*starts_next=*/true);
    });
  }
  add("linear_few", [rows](cudaStream_t stream, const ExpertGemm& gemm) {
    return LaunchLinearFew(stream, gemm, rows,
                           CutLinearFew(rows, gemm.columns, gemm.k, /*clusters=*/true));
  });
  for (const int teams : {2, 4}) {
    for (const int ranks : {1, 2, 4}) {
      if (teams * ranks > 8) continue;
      add("sm90, teams " + std::to_string(teams) + ", ranks " + std::to_string(ranks),
          [=](cudaStream_t stream, const ExpertGemm& gemm) {
            const auto launch = teams == 2 ? LaunchSm90<2> : LaunchSm90<4>;
            return launch(stream, gemm, rows, ranks);
          });
    }
  }
  add("as chosen", [rows](cudaStream_t stream, const ExpertGemm& gemm) {
    const LinearDevice device = {MultiprocessorCount(), BlockSharedBytes(), true, true};
    const LinearForm form = ChooseLinearForm(rows, gemm.columns, gemm.k, device);
    if (form == LinearForm::kSm90) return LaunchLinearSm90(stream, gemm, rows);
    if (form == LinearForm::kRow) return LaunchLinearRow(stream, gemm, nullptr, true);
    return LaunchLinearFew(stream, gemm, rows, CutLinearFew(rows, gemm.columns, gemm.k, true));
  });
  return candidates;
}

void* Filled(int64_t bytes, int value) {
  void* memory = nullptr;
  Check(cudaMalloc(&memory, bytes), "cudaMalloc");
  Check(cudaMemset(memory, value, bytes), "cudaMemset");
  return memory;
}

// Returns the median of the microseconds of function(stream), which launches kernels. It is
// negative if a launch fails, as those of forms that do not run a size.
template <typename Function>
double MedianUs(const Function& function) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t program;
  Check(cudaStreamCreate(&stream), "cudaStreamCreate");
  Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  const cudaError_t launched = function(stream), ended = cudaStreamEndCapture(stream, &graph);
  if (launched != cudaSuccess || ended != cudaSuccess) {
    cudaGetLastError();
    return -1.0;
  }
  Check(cudaGraphInstantiate(&program, graph, 0), "cudaGraphInstantiate");
  cudaEvent_t from, to;
  Check(cudaEventCreate(&from), "cudaEventCreate");
  Check(cudaEventCreate(&to), "cudaEventCreate");
  std::vector<float> times;
  for (int i = -kWarmups; i < kRepeats; ++i) {
    Check(cudaEventRecord(from, stream), "cudaEventRecord");
    Check(cudaGraphLaunch(program, stream), "cudaGraphLaunch");
    Check(cudaEventRecord(to, stream), "cudaEventRecord");
    Check(cudaStreamSynchronize(stream), "a graph");
    float ms = 0.0f;
    Check(cudaEventElapsedTime(&ms, from, to), "cudaEventElapsedTime");
    if (i >= 0) times.push_back(ms);
  }
  cudaEventDestroy(from);
  cudaEventDestroy(to);
  cudaGraphExecDestroy(program);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  std::nth_element(times.begin(), times.begin() + kRepeats / 2, times.end());
  return 1e3 * times[kRepeats / 2];
}

// Copies 16 bytes for each thread.
__global__ void Copy(const uint4* from, uint4* to) {
  const int64_t at = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  to[at] = from[at];
}

double CopyTbPerS() {
  constexpr int64_t kBytes = int64_t{2} << 30, kThreads = 512;
  const auto* const from = static_cast<const uint4*>(Filled(kBytes, 1));
  auto* const to = static_cast<uint4*>(Filled(kBytes, 0));
  const double us = MedianUs([&](cudaStream_t stream) {
    Copy<<<kBytes / sizeof(uint4) / kThreads, kThreads, 0, stream>>>(from, to);
    return cudaGetLastError();
  });
  cudaFree(const_cast<uint4*>(from));
  cudaFree(to);
  return 2 * kBytes / us * 1e-6;
}

void PrintTimes(const Size& size) {
  const int64_t tiles = CeilDiv(size.n, kTileM) * KTiles(static_cast<int32_t>(size.k));
  const int64_t bytes = tiles * (kTileCodeBytes + kTileScaleBytes);
  const int64_t launches =
      std::min<int64_t>(std::max<int64_t>(kAllBytes / bytes, kMinLaunches), kMaxLaunches);
  auto* codes = static_cast<uint8_t*>(Filled(launches * tiles * kTileCodeBytes, 0x2a));
  auto* scales = static_cast<uint8_t*>(Filled(launches * tiles * kTileScaleBytes, 0x38));
  auto* global_scale = static_cast<float*>(Filled(sizeof(float), 0));
  void* const x = Filled(size.rows * size.k * 2, 0x3c);
  void* const y = Filled(size.rows * size.n * 2, 0);
  std::vector<ExpertGemm> gemms;
  for (int64_t i = 0; i < launches; ++i) {
    ExpertGemm gemm = {};
    gemm.type = DataType::kBF16;
    gemm.left = {x, nullptr, 1, static_cast<int32_t>(size.rows), nullptr, nullptr};
    gemm.weight.packed = codes + i * tiles * kTileCodeBytes;
    gemm.weight.block_scale = scales + i * tiles * kTileScaleBytes;
    gemm.weight.global_scale = global_scale;
    gemm.bias_rows = gemm.columns = static_cast<int32_t>(size.n);
    gemm.parts = 1;
    gemm.k = static_cast<int32_t>(size.k);
    gemm.output = {y, gemm.type, nullptr};
    gemm.schedule_is_unchanged = true;
    gemms.push_back(gemm);
  }
  for (const Candidate& candidate : CandidatesOf(size)) {
    const double us = MedianUs([&](cudaStream_t stream) {
      cudaError_t status = cudaSuccess;
      for (size_t i = 0; i < gemms.size() && status == cudaSuccess; ++i) {
        status = candidate.launch(stream, gemms[i]);
      }
      return status;
    });
    if (us < 0.0) continue;
    std::printf("%lld %lld %lld %.3f %s\n", static_cast<long long>(size.rows),
                static_cast<long long>(size.n), static_cast<long long>(size.k),
                us / static_cast<double>(launches), candidate.name.c_str());
  }
  std::fflush(stdout);
  for (void* memory : {static_cast<void*>(codes), static_cast<void*>(scales),
                       static_cast<void*>(global_scale), x, y}) {
    cudaFree(memory);
  }
}

}  // namespace
}  // namespace nvfp4

int main(int count, char** given) {
  std::vector<nvfp4::Size> sizes;
  for (int i = 1; i + 2 < count; i += 3) {
    sizes.push_back({std::atoll(given[i]), std::atoll(given[i + 1]), std::atoll(given[i + 2])});
  }
  std::printf("%.3f\n", nvfp4::CopyTbPerS());
  for (const nvfp4::Size& size : sizes) nvfp4::PrintTimes(size);
}
