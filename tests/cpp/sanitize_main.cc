// Runs the CPU ops on edge cases with buffers of exactly the right size, for sanitizers.
//
// The cases cover every instruction set, dtype and scheme. One and four threads must give the same
// bytes. test_cpu_kernel.py checks the numbers, and run_sanitizers.sh builds this program.
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <queue>
#include <random>
#include <thread>
#include <vector>

#include "../../ffi/cpu/ops.h"

namespace nvfp4::cpu {
namespace {

class Threads : public ThreadPool {
 public:
  explicit Threads(int count) {
    for (int i = 0; i < count; ++i) threads_.emplace_back([this] { Serve(); });
  }
  ~Threads() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      closed_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  int64_t NumThreads() override { return static_cast<int64_t>(threads_.size()) + 1; }
  void Schedule(std::function<void()> task) override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      tasks_.push(std::move(task));
    }
    changed_.notify_one();
  }

 private:
  void Serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return closed_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      std::function<void()> task = std::move(tasks_.front());
      tasks_.pop();
      lock.unlock();
      task();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::queue<std::function<void()>> tasks_;
  bool closed_ = false;
  std::vector<std::thread> threads_;
};

struct Case {
  int64_t t, top_k, e, h, i;
  int32_t low, high;  // expert ids are drawn from [low, high]
};

constexpr Case kCases[] = {
    {0, 2, 4, 64, 48, 0, 3},      {1, 2, 4, 64, 48, 0, 3},
    {3, 1, 1, 16, 16, 0, 0},      {5, 3, 7, 80, 48, -2, 9},
    {33, 1, 1, 544, 64, 0, 0},    {270, 1, 5, 64, 32, 3, 3},
    {2, 2, 3, 1040, 1856, 0, 2},  {9, 2, 4, 32, 32, -1, -1},
    {4, 32, 512, 32, 16, 0, 511}, {40, 4, 6, 64, 32, INT32_MIN, INT32_MAX},
};

struct Scheme {
  ActivationScale scale;
  Activation kind;
  bool gated, interleaved, weight_on_input;
};

constexpr Scheme kSchemes[] = {
    {ActivationScale::kNone, Activation::kSilu, true, false, false},
    {ActivationScale::kNone, Activation::kSwigluOai, true, true, true},
    {ActivationScale::kStatic, Activation::kGelu, true, false, false},
    {ActivationScale::kToken, Activation::kRelu2, false, false, false},
};

// A heap block of exactly `count` elements, so that an access one byte past the end is noticed.
template <typename T>
struct Exact {
  explicit Exact(int64_t count) : count(count), data(new T[count]) {}
  Exact(const Exact&) = delete;
  ~Exact() { delete[] data; }
  int64_t count;
  T* data;
};

using Random = std::mt19937;

void FillBytes(Random& random, Exact<uint8_t>& bytes, uint8_t mask) {
  for (int64_t i = 0; i < bytes.count; ++i) {
    const auto byte = static_cast<uint8_t>(random());
    bytes.data[i] = (byte & mask & 0x7f) == 0x7f ? 0x38 : byte & mask;
  }
}

void FillFloats(Random& random, Exact<float>& values) {
  for (int64_t i = 0; i < values.count; ++i) values.data[i] = 0.01f * (1 + random() % 8);
}

// Fills x with numbers of magnitude at most 1. Their bits matter little, but NaN would matter.
void FillActivations(Random& random, Exact<uint8_t>& x, DataType type) {
  for (int64_t i = 0; i < x.count / Bytes(type); ++i) {
    const float value = static_cast<float>(random() % 1000) / 500.0f - 1.0f;
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    const auto half =
        static_cast<uint16_t>(type == DataType::kF16 ? random() % 0x3c00 : bits >> 16);
    if (type == DataType::kF32) {
      std::memcpy(x.data + 4 * i, &bits, 4);
    } else {
      std::memcpy(x.data + 2 * i, &half, 2);
    }
  }
}

struct LayerBuffers {
  LayerBuffers(const Case& c, DataType type, const Scheme& scheme)
      : n1(scheme.gated ? 2 * c.i : c.i),
        x(c.t * c.h * Bytes(type)),
        gate_up(c.e * n1 * c.h / 2),
        gate_up_scale(c.e * n1 * c.h / 16),
        gate_up_global(c.e * 2),
        input_scale(c.e),
        gate_up_bias(c.e * n1),
        down(c.e * c.h * c.i / 2),
        down_scale(c.e * c.h * c.i / 16),
        down_global(c.e),
        down_bias(c.e * c.h),
        ids(c.t * c.top_k),
        weights(c.t * c.top_k),
        y(c.t * c.h * Bytes(type)) {
    Random random(1);
    FillActivations(random, x, type);
    for (Exact<uint8_t>* codes : {&gate_up, &down}) FillBytes(random, *codes, 0xff);
    for (Exact<uint8_t>* scales : {&gate_up_scale, &down_scale}) FillBytes(random, *scales, 0xbf);
    for (Exact<float>* values :
         {&gate_up_global, &input_scale, &gate_up_bias, &down_global, &down_bias, &weights})
      FillFloats(random, *values);
    const auto span = static_cast<uint64_t>(int64_t{c.high} - c.low + 1);
    for (int64_t i = 0; i < ids.count; ++i)
      ids.data[i] = static_cast<int32_t>(c.low + static_cast<int64_t>(random() % span));
  }
  int64_t n1;
  Exact<uint8_t> x, gate_up, gate_up_scale;
  Exact<float> gate_up_global, input_scale, gate_up_bias;
  Exact<uint8_t> down, down_scale;
  Exact<float> down_global, down_bias;
  Exact<int32_t> ids;
  Exact<float> weights;
  Exact<uint8_t> y;
};

// Runs one layer, and returns the bytes of its output.
std::vector<uint8_t> RunLayer(const Case& c, DataType type, const Scheme& scheme,
                              const Kernels& kernels, int threads, int64_t shrink) {
  LayerBuffers b(c, type, scheme);
  MoEArguments arguments = {b.x.data,
                            b.gate_up.data,
                            b.gate_up_scale.data,
                            b.gate_up_global.data,
                            b.input_scale.data,
                            b.gate_up_bias.data,
                            b.down.data,
                            b.down_scale.data,
                            b.down_global.data,
                            b.input_scale.data,
                            b.down_bias.data,
                            b.ids.data,
                            b.weights.data,
                            b.y.data,
                            nullptr,
                            0,
                            type,
                            {scheme.kind, scheme.gated, scheme.interleaved, 1.7f, 1.0f, INFINITY},
                            scheme.scale,
                            scheme.weight_on_input};
  const MoEShape shape = {c.t, c.top_k, c.e, c.h, c.i, b.n1};
  const int64_t tokens = (c.t + shrink - 1) / shrink;
  Exact<uint8_t> workspace(MoEW4A16CpuWorkspace(shape, arguments, kernels, tokens));
  arguments.workspace = workspace.data;
  arguments.workspace_bytes = workspace.count;
  Threads pool(threads - 1);
  if (!RunMoEW4A16Cpu(shape, arguments, kernels, pool)) std::abort();
  return std::vector<uint8_t>(b.y.data, b.y.data + b.y.count);
}

void RunGemm(DataType type, ActivationScale scale, const Kernels& kernels, int64_t n) {
  const int64_t m = 37, k = 80, e = 4, n_pad = RoundUp(n, kGroup);
  Random random(2);
  Exact<uint8_t> x(m * k * Bytes(type)), packed(e * n_pad * k / 2), scales(e * n_pad * k / 16);
  Exact<float> global(e * 2), input(e), bias(e * n);
  Exact<uint8_t> y(m * n * Bytes(type));
  FillActivations(random, x, type);
  FillBytes(random, packed, 0xff);
  FillBytes(random, scales, 0xbf);
  for (Exact<float>* values : {&global, &input, &bias}) FillFloats(random, *values);
  const int32_t sizes[] = {5, -3, 20, 4};
  GroupedGemmArguments arguments = {x.data,     packed.data, scales.data, global.data,
                                    input.data, bias.data,   sizes,       y.data,
                                    nullptr,    0,           type,        scale};
  const GroupedGemmShape shape = {m, n, n_pad, k, e, 2};
  for (int64_t rows : {m, int64_t{10}}) {
    Exact<uint8_t> workspace(GroupedGemmW4A16CpuWorkspace(shape, arguments, kernels, rows));
    arguments.workspace = workspace.data;
    arguments.workspace_bytes = workspace.count;
    Threads pool(2);
    if (!RunGroupedGemmW4A16Cpu(shape, arguments, kernels, pool)) std::abort();
  }
}

struct TransposedCase {
  int64_t n, k;
  std::vector<int32_t> sizes;  // of the groups of 37 rows
};

const TransposedCase kTransposedCases[] = {
    {48, 80, {5, -3, 20, 4}}, {77, 16, {1, 2, 3, 4}},      {1040, 144, {0, 1, 7, 60}},
    {16, 32, {37}},           {2064, 16, {0, 0, 2, 0, 1}}, {1, 16, {1, 30}},
};

// Runs a product with transposed weights, and returns the bytes of its output.
std::vector<uint8_t> RunTransposed(const TransposedCase& c, DataType type, const Kernels& kernels,
                                   int threads, int64_t rows) {
  const int64_t m = 37, e = static_cast<int64_t>(c.sizes.size()), n_pad = RoundUp(c.n, kGroup);
  Random random(7);
  Exact<uint8_t> x(m * c.n * Bytes(type)), packed(e * n_pad * c.k / 2),
      scales(e * n_pad * c.k / 16);
  Exact<float> global(e);
  Exact<uint8_t> y(m * c.k * Bytes(type));
  FillActivations(random, x, type);
  FillBytes(random, packed, 0xff);
  FillBytes(random, scales, 0xbf);
  FillFloats(random, global);
  TransposedGemmArguments arguments = {
      x.data, packed.data, scales.data, global.data, e == 1 ? nullptr : c.sizes.data(),
      y.data, nullptr,     0,           type,        m,
      e,      c.n,         c.k};
  Exact<uint8_t> workspace(TransposedGemmCpuWorkspace(arguments, kernels, rows));
  arguments.workspace = workspace.data;
  arguments.workspace_bytes = workspace.count;
  Threads pool(threads - 1);
  if (!RunTransposedGemmCpu(arguments, kernels, pool)) std::abort();
  return std::vector<uint8_t>(y.data, y.data + y.count);
}

void RunAllTransposed(DataType type, const Kernels& kernels) {
  for (const TransposedCase& c : kTransposedCases) {
    const std::vector<uint8_t> expected = RunTransposed(c, type, kernels, 1, 37);
    if (RunTransposed(c, type, kernels, 4, 37) != expected) std::abort();
    RunTransposed(c, type, kernels, 2, 10);
  }
}

void RunQuantizer(DataType type, const Kernels& kernels) {
  const int64_t m = 131, k = 304;
  Random random(3);
  Exact<uint8_t> x(m * k * Bytes(type)), packed(m * k / 2);
  FillActivations(random, x, type);
  for (bool swizzle : {false, true}) {
    Exact<uint8_t> scales(swizzle ? RoundUp(m, 128) * RoundUp(k / 16, 4) : m * k / 16);
    Threads pool(2);
    float g = 0.0f;
    RunQuantizeCpu({x.data, type, m, k, nullptr, swizzle, packed.data, scales.data, &g}, kernels,
                   pool);
  }
}

void RunAllDense(const Kernels& kernels) {
  for (int64_t m : {1, 2, 3, 4, 5, 6, 7, 8, 11}) {
    for (int64_t k : {0, 15, 1039}) {
      const int64_t n = 37;
      Random random(6);
      Exact<float> x(m * k), y(m * n);
      Exact<uint8_t> weight(2 * n * k);
      FillFloats(random, x);
      FillActivations(random, weight, DataType::kBF16);
      Threads pool(2);
      RunDenseCpu({x.data, reinterpret_cast<uint16_t*>(weight.data), y.data, m, n, k}, kernels,
                  pool);
    }
  }
}

struct AttentionCase {
  int64_t b, t, n, m, s, d, dv;
  int32_t first;  // position of the first token
  int64_t window, chunk;
};

constexpr AttentionCase kAttentionCases[] = {
    {1, 1, 1, 1, 1, 1, 1, 0, 0, 0},          {2, 1, 32, 4, 2500, 64, 40, 2200, 0, 0},
    {1, 3, 130, 1, 1100, 33, 7, 1000, 9, 0}, {1, 70, 6, 3, 70, 16, 24, 0, 0, 16},
    {1, 300, 8, 2, 301, 128, 128, 1, 0, 0},  {2, 9, 4, 4, 40, 80, 72, 50, 1, 0},
};

std::vector<uint8_t> RunAttention(const AttentionCase& c, const AttentionKernels& kernels,
                                  int threads) {
  Random random(4);
  Exact<uint8_t> q(2 * c.b * c.t * c.n * c.d), k(2 * c.b * c.m * c.s * c.d);
  Exact<uint8_t> v(2 * c.b * c.m * c.s * c.dv), y(2 * c.b * c.t * c.n * c.dv);
  for (Exact<uint8_t>* x : {&q, &k, &v}) FillActivations(random, *x, DataType::kBF16);
  Exact<int32_t> positions(c.b * c.t);
  for (int64_t i = 0; i < positions.count; ++i)
    positions.data[i] = static_cast<int32_t>(c.first + i % c.t);
  positions.data[positions.count - 1] = INT32_MAX;  // padding
  Exact<float> sinks(c.n);
  FillFloats(random, sinks);
  const auto at = [](Exact<uint8_t>& x) { return reinterpret_cast<uint16_t*>(x.data); };
  const AttentionArguments arguments = {
      at(q), at(k), at(v), positions.data, sinks.data, at(y), c.b,      c.t,    c.n,
      c.m,   c.s,   c.d,   c.dv,           c.dv,       0.1f,  c.window, c.chunk};
  Threads pool(threads - 1);
  RunAttentionCpu(arguments, kernels, pool);
  return std::vector<uint8_t>(y.data, y.data + y.count);
}

void RunAllAttention(std::string_view isa, const AttentionKernels& kernels) {
  if (!kernels.supported()) return;
  for (const AttentionCase& c : kAttentionCases) {
    if (RunAttention(c, kernels, 4) != RunAttention(c, kernels, 1)) std::abort();
  }
  std::printf("attention, %.*s: ok\n", static_cast<int>(isa.size()), isa.data());
}

struct HeadsCase {
  int64_t b, t, n, m, d, half, s;
  bool norms, rotates_first, gated;
};

constexpr HeadsCase kHeadsCases[] = {
    {1, 1, 1, 1, 1, 0, 1, false, false, false},
    {2, 9, 5, 3, 33, 16, 12, true, false, true},
    {1, 3, 2, 1, 256, 128, 4, true, true, false},
    {3, 2, 4, 4, 17, 1, 9, true, false, false},
};

std::vector<uint8_t> RunHeads(const HeadsCase& c, DataType type, const Kernels& kernels,
                              int threads) {
  Random random(5);
  const int64_t heads = (c.gated ? 2 : 1) * c.n + 2 * c.m, cached = c.b * c.m * c.s * c.d;
  Exact<uint8_t> qkv(2 * c.b * c.t * heads * c.d), q(2 * c.b * c.t * c.n * c.d);
  Exact<uint8_t> keys(2 * cached), values(2 * cached), weight(2 * c.d);
  for (Exact<uint8_t>* x : {&qkv, &keys, &values, &weight}) FillActivations(random, *x, type);
  Exact<int32_t> positions(c.b * c.t);
  for (int64_t i = 0; i < positions.count; ++i)
    positions.data[i] = static_cast<int32_t>(c.s - 2 + i % c.t);  // some are past the end
  positions.data[positions.count - 1] = -1;
  Exact<float> frequencies(c.half);
  FillFloats(random, frequencies);
  const void* norm = c.norms ? weight.data : nullptr;
  Threads pool(threads - 1);
  RunHeadsCpu({{c.b, c.t, c.s, c.n, c.m, c.d, c.half},
               type,
               type,
               qkv.data,
               positions.data,
               norm,
               norm,
               frequencies.data,
               q.data,
               keys.data,
               values.data,
               1e-6f,
               1.5f,
               c.rotates_first,
               c.gated},
              kernels, pool);
  std::vector<uint8_t> all(q.data, q.data + q.count);
  all.insert(all.end(), keys.data, keys.data + keys.count);
  all.insert(all.end(), values.data, values.data + values.count);
  return all;
}

void RunAllHeads(const Kernels& kernels) {
  for (DataType type : {DataType::kBF16, DataType::kF16}) {
    for (const HeadsCase& c : kHeadsCases) {
      if (RunHeads(c, type, kernels, 4) != RunHeads(c, type, kernels, 1)) std::abort();
    }
  }
}

void RunAll(const Kernels& kernels) {
  for (DataType type : {DataType::kBF16, DataType::kF16, DataType::kF32}) {
    for (const Scheme& scheme : kSchemes) {
      for (const Case& c : kCases) {
        const std::vector<uint8_t> expected = RunLayer(c, type, scheme, kernels, 1, 1);
        if (RunLayer(c, type, scheme, kernels, 4, 1) != expected) std::abort();
        RunLayer(c, type, scheme, kernels, 2, 3);
      }
    }
    for (ActivationScale scale :
         {ActivationScale::kNone, ActivationScale::kStatic, ActivationScale::kToken}) {
      for (int64_t n : {48, 77}) RunGemm(type, scale, kernels, n);
    }
    RunAllTransposed(type, kernels);
    RunQuantizer(type, kernels);
  }
  RunAllHeads(kernels);
  RunAllDense(kernels);
}

}  // namespace
}  // namespace nvfp4::cpu

int main() {
  for (std::string_view isa : nvfp4::cpu::SupportedIsas()) {
    nvfp4::cpu::RunAll(*nvfp4::cpu::ChooseKernels(isa));
    std::printf("%.*s: ok\n", static_cast<int>(isa.size()), isa.data());
  }
#if defined(__x86_64__)
  nvfp4::cpu::RunAllAttention("amx", nvfp4::cpu::kAttentionAmx);
  nvfp4::cpu::RunAllAttention("avx512", nvfp4::cpu::kAttentionAvx512);
#endif
  return 0;
}
