// Computes one expert layer:
//   y[t] = sum_j weight[t, j] * (W2[e] @ act(W1[e] @ x[t])), e = expert_ids[t, j]
//
//   x, y           [t, h]  bf16, f16 or f32; float32 sums
//   gate_up, down  [e, n1, h], [e, h, i]  NVFP4 in layout "cpu_16x16" (kernels.h)
//   expert_ids     [t, top_k]  ids outside [0, e) contribute nothing
//
// Bottleneck: reading weights while experts have few rows, then the matrix products (gemm_*.cc).
//
// A round takes as many tokens as the workspace holds. It has these phases, each of them split into
// items that any thread can take (phases.h):
//   route      sorts the slots (t, j) by expert, stably: position[slot], and blocks of rows
//   prepare    converts x to sorted rows in the format of the kernels; quantizes them in W4A4
//   gate_up    for each (row block, column pairs): product, scale, bias, activation -> rows of `a`
//   requantize in W4A4: quantizes the rows of `a`, which are float32
//   down       for each (row block, column pairs): product, scale, bias -> rows of `d`, float32
//   combine    y[t] = sum over j, in order, of weight * d[position]
//
// Every sum runs in an order that the shapes of the operands fix. Results therefore depend neither
// on the number of threads nor on other calls.
//
// Test: tests/backends/test_cpu_kernel.py. Reference: ops/experts/meaning.py.
#include <cstring>

#include "experts.h"
#include "ops.h"

namespace nvfp4::cpu {
namespace {

enum Stage : int64_t { kRoute, kPrepare, kGateUp, kRequantize, kDown, kCombine, kStages };

constexpr int64_t kItemValues =
    1 << 16;  // values that one item of prepare, requantize or combine handles

// The arrays in the workspace, for rounds of up to `slots` slots.
struct Workspace {
  Workspace(Carver& carver, int64_t slots, int64_t experts, int64_t x_stride, int64_t a_stride,
            int64_t d_values) {
    position = carver.Take<int32_t>(slots);
    offsets = carver.Take<int64_t>(experts + 1);
    blocks = carver.Take<RowBlock>(MostBlocks(slots, experts));
    x_scale = carver.Take<float>(slots);
    a_scale = carver.Take<float>(slots);
    // Kernels may read up to 15 rows past the last one.
    x = carver.Take<uint8_t>((slots + kGroup) * x_stride);
    a = carver.Take<uint8_t>((slots + kGroup) * a_stride);
    d = carver.Take<float>(slots * d_values);
  }
  int32_t* position;  // [slots] row of a slot; -1 if the slot is not routed
  int64_t* offsets;   // [experts + 1] first row of an expert
  RowBlock* blocks;
  float* x_scale;  // [rows] scales of prepared rows
  float* a_scale;
  uint8_t* x;  // [rows, x_stride]
  uint8_t* a;
  float* d;  // [rows, h]; in W4A4, first the activations [rows, i]
};

class Layer {
 public:
  Layer(const MoEShape& shape, const MoEArguments& arguments, const Kernels& kernels)
      : s_(shape), p_(arguments), kernels_(kernels) {
    const int64_t mean_rows = s_.e ? s_.slots() / s_.e : 0;
    format_ = kernels.row_format(p_.type, p_.activation_scale, mean_rows);
    x_stride_ = format_.stride(s_.h);
    a_stride_ = format_.stride(s_.i);
    quantized_ = p_.activation_scale != ActivationScale::kNone;
    gate_up_ = {p_.gate_up_packed, p_.gate_up_block_scale, s_.n1 / kGroup, s_.h};
    down_ = {p_.down_packed, p_.down_block_scale, s_.h / kGroup, s_.i};
    gate_up_pairs_ = p_.activation.gated ? s_.i / kGroup : CeilDivide(s_.i, kPair);
    down_pairs_ = CeilDivide(s_.h, kPair);
    gate_up_step_ = PairsPerItem(s_.h);
    down_step_ = PairsPerItem(s_.i);
  }

  int64_t WorkspaceBytes(int64_t tokens) const {
    Carver carver(nullptr);
    Carve(carver, tokens);
    return carver.used();
  }

  bool Begin() {
    round_tokens_ = LargestFit(s_.t, p_.workspace_bytes,
                               [this](int64_t tokens) { return WorkspaceBytes(tokens); });
    if (round_tokens_ == 0) return s_.t == 0;
    return true;
  }

  void Run(ThreadPool& pool) {
    if (s_.t == 0) return;
    Carver carver(p_.workspace);
    Workspace workspace = Carve(carver, round_tokens_);
    w_ = &workspace;
    const int64_t rounds = CeilDivide(s_.t, round_tokens_);
    RunPhases(
        pool, rounds * kStages,
        [this](int64_t phase) { return Items(phase / kStages, phase % kStages); },
        [this](int64_t phase, int64_t item) { Do(phase / kStages, phase % kStages, item); });
  }

 private:
  Workspace Carve(Carver& carver, int64_t tokens) const {
    const int64_t d_values = quantized_ ? std::max(s_.h, s_.i) : s_.h;
    return Workspace(carver, tokens * s_.top_k, s_.e, x_stride_, a_stride_, d_values);
  }

  int64_t FirstToken(int64_t round) const { return round * round_tokens_; }
  int64_t Tokens(int64_t round) const { return std::min(round_tokens_, s_.t - FirstToken(round)); }
  int64_t TokensPerItem() const {
    return std::max<int64_t>(1, kItemValues / (s_.h * std::max<int64_t>(1, s_.top_k)));
  }
  int64_t RowsPerItem() const { return std::max<int64_t>(1, kItemValues / s_.i); }

  int64_t Items(int64_t round, int64_t stage) const {
    switch (stage) {
      case kRoute:
        return 1;
      case kPrepare:
      case kCombine:
        return CeilDivide(Tokens(round), TokensPerItem());
      case kGateUp:
        return blocks_ * CeilDivide(gate_up_pairs_, gate_up_step_);
      case kRequantize:
        return quantized_ ? CeilDivide(rows_, RowsPerItem()) : 0;
      default:
        return blocks_ * CeilDivide(down_pairs_, down_step_);
    }
  }

  void Do(int64_t round, int64_t stage, int64_t item) {
    const int64_t first = item * TokensPerItem();
    const int64_t end = std::min(first + TokensPerItem(), Tokens(round));
    switch (stage) {
      case kRoute:
        return Route(round);
      case kPrepare:
        for (int64_t token = first; token < end; ++token) Prepare(FirstToken(round), token);
        return;
      case kGateUp:
        return ForPairs(item, gate_up_pairs_, gate_up_step_, &Layer::GateUp);
      case kRequantize:
        return Requantize(item);
      case kDown:
        return ForPairs(item, down_pairs_, down_step_, &Layer::Down);
      default:
        for (int64_t token = first; token < end; ++token) Combine(FirstToken(round), token);
    }
  }

  bool Valid(int32_t expert) const { return expert >= 0 && expert < s_.e; }

  void Route(int64_t round) {
    const int32_t* ids = p_.expert_ids + FirstToken(round) * s_.top_k;
    const int64_t slots = Tokens(round) * s_.top_k;
    int64_t* offsets = w_->offsets;
    std::fill(offsets, offsets + s_.e + 1, 0);
    for (int64_t slot = 0; slot < slots; ++slot) {
      if (Valid(ids[slot])) ++offsets[ids[slot] + 1];
    }
    blocks_ = rows_ = 0;
    for (int64_t e = 0; e < s_.e; ++e) {
      const int64_t count = offsets[e + 1];
      offsets[e] = rows_;  // the row of the next slot of e
      blocks_ += CutRows(e, rows_, count, w_->blocks + blocks_);
      rows_ += count;
    }
    for (int64_t slot = 0; slot < slots; ++slot)
      w_->position[slot] =
          Valid(ids[slot]) ? static_cast<int32_t>(offsets[ids[slot]]++) : int32_t{-1};
  }

  // Prepares the rows of one token. Experts whose rows have the same values share one conversion.
  void Prepare(int64_t first_token, int64_t token) {
    const int64_t row_bytes = Bytes(p_.type) * s_.h;
    RowSource source = {static_cast<const uint8_t*>(p_.x) + (first_token + token) * row_bytes,
                        p_.type,
                        s_.h,
                        p_.weight_on_input,
                        1.0f,
                        p_.activation_scale,
                        1.0f};
    const int64_t slot = (first_token + token) * s_.top_k;
    int64_t shared = -1;
    float shared_scale = 0.0f;
    for (int64_t j = 0; j < s_.top_k; ++j) {
      const int64_t row = w_->position[token * s_.top_k + j];
      if (row < 0) continue;
      if (p_.activation_scale == ActivationScale::kStatic)
        source.input_scale = p_.gate_up_input_scale[p_.expert_ids[slot + j]];
      source.weight = p_.expert_weights[slot + j];
      uint8_t* to = w_->x + row * x_stride_;
      if (shared >= 0 && !source.weigh && shared_scale == source.input_scale) {
        std::memcpy(to, w_->x + shared * x_stride_, x_stride_);
        w_->x_scale[row] = w_->x_scale[shared];
        continue;
      }
      w_->x_scale[row] = kernels_.prepare_row(source, format_, to);
      shared = row;
      shared_scale = source.input_scale;
    }
  }

  void ForPairs(int64_t item, int64_t pairs, int64_t step,
                void (Layer::*run)(const RowBlock&, int64_t, bool) const) {
    const int64_t items = CeilDivide(pairs, step);
    const RowBlock& block = w_->blocks[item / items];
    const int64_t first = item % items * step, end = std::min(first + step, pairs);
    for (int64_t pair = first; pair < end; ++pair) (this->*run)(block, pair, pair + 1 == end);
  }

  // Returns the weight row of gate_up that gives column c of a pair.
  int64_t GateUpRow(int64_t pair, int64_t c) const {
    const bool split = p_.activation.gated && !p_.activation.interleaved;
    return split ? pair * kGroup + c % kGroup + c / kGroup * s_.i : pair * kPair + c;
  }

  Affine GateUpAffine(const RowBlock& block, int64_t pair) const {
    Affine affine;
    affine.row_scale = w_->x_scale + block.first;
    const int64_t parts = p_.activation.gated ? 2 : 1;
    for (int64_t c = 0; c < kPair; ++c) {
      const int64_t row = GateUpRow(pair, c);
      const int64_t part = parts == 1 ? 0 : (p_.activation.interleaved ? c % 2 : c / kGroup);
      affine.scale[c] = p_.gate_up_global_scale[block.expert * parts + part];
      const bool bias = p_.gate_up_bias && row < s_.n1;
      affine.bias[c] = bias ? p_.gate_up_bias[block.expert * s_.n1 + row] : 0.0f;
    }
    return affine;
  }

  void GateUp(const RowBlock& block, int64_t pair, bool last) const {
    alignas(kCacheLine) float acc[kRowBlock * kPair];
    const int64_t first = GateUpRow(pair, 0) / kGroup, second = GateUpRow(pair, kGroup) / kGroup;
    const int64_t advance = last ? 0 : GateUpRow(pair + 1, 0) / kGroup - first;
    const WeightPair weights = gate_up_.pair(block.expert, first, second, advance);
    const Rows rows = {w_->x + block.first * x_stride_, x_stride_, block.count, format_};
    kernels_.multiply(weights, rows, acc);
    kernels_.activate(p_.activation, GateUpAffine(block, pair), p_.type, block.count, acc);
    const int64_t width = p_.activation.gated ? kGroup : kPair, column = pair * width;
    StoreActivations(block, acc, column, std::min(width, s_.i - column));
  }

  void StoreActivations(const RowBlock& block, const float* values, int64_t column,
                        int64_t columns) const {
    if (quantized_) {
      for (int64_t r = 0; r < block.count; ++r)
        std::memcpy(w_->d + (block.first + r) * s_.i + column, values + r * kPair, columns * 4);
      return;
    }
    const int64_t k_pad = RoundUp(s_.i, kRowPadding);
    uint8_t* rows = w_->a + block.first * a_stride_;
    kernels_.store_columns(values, block.count, columns, format_, k_pad, a_stride_, column, rows);
    if (column + columns == s_.i) {
      for (int64_t r = 0; r < block.count; ++r) {
        w_->a_scale[block.first + r] = 1.0f;
        const float zeros[kPair] = {};
        kernels_.store_columns(zeros, 1, k_pad - s_.i, format_, k_pad, a_stride_, s_.i,
                               rows + r * a_stride_);
      }
    }
  }

  void Requantize(int64_t item) const {
    const int64_t first = item * RowsPerItem(), end = std::min(first + RowsPerItem(), rows_);
    const int64_t* ends = w_->offsets;  // after Route: where the rows of each expert end
    int64_t expert = std::upper_bound(ends, ends + s_.e, first) - ends;
    for (int64_t row = first; row < end; ++row) {
      while (row >= ends[expert]) ++expert;
      const float g =
          p_.activation_scale == ActivationScale::kStatic ? p_.down_input_scale[expert] : 1.0f;
      const RowSource source = {
          w_->d + row * s_.i, DataType::kF32, s_.i, false, 1.0f, p_.activation_scale, g};
      w_->a_scale[row] = kernels_.prepare_row(source, format_, w_->a + row * a_stride_);
    }
  }

  void Down(const RowBlock& block, int64_t pair, bool last) const {
    alignas(kCacheLine) float acc[kRowBlock * kPair];
    const WeightPair weights = down_.pair(block.expert, 2 * pair, 2 * pair + 1, last ? 0 : 2);
    const Rows rows = {w_->a + block.first * a_stride_, a_stride_, block.count, format_};
    kernels_.multiply(weights, rows, acc);
    const int64_t column = pair * kPair, columns = std::min(kPair, s_.h - column);
    Affine affine;
    affine.row_scale = w_->a_scale + block.first;
    for (int64_t c = 0; c < kPair; ++c) {
      affine.scale[c] = p_.down_global_scale[block.expert];
      const bool bias = p_.down_bias && c < columns;
      affine.bias[c] = bias ? p_.down_bias[block.expert * s_.h + column + c] : 0.0f;
    }
    kernels_.scale_and_bias(affine, block.count, acc);
    for (int64_t r = 0; r < block.count; ++r)
      std::memcpy(w_->d + (block.first + r) * s_.h + column, acc + r * kPair, columns * 4);
  }

  void Combine(int64_t first_token, int64_t token) const {
    constexpr int64_t kColumns = 256;
    float sum[kColumns];
    uint8_t* y = static_cast<uint8_t*>(p_.y) + (first_token + token) * s_.h * Bytes(p_.type);
    const float* weights = p_.expert_weights + (first_token + token) * s_.top_k;
    for (int64_t column = 0; column < s_.h; column += kColumns) {
      const int64_t columns = std::min(kColumns, s_.h - column);
      std::fill(sum, sum + columns, 0.0f);
      for (int64_t j = 0; j < s_.top_k; ++j) {
        const int64_t row = w_->position[token * s_.top_k + j];
        if (row < 0) continue;
        const float weight = p_.weight_on_input ? 1.0f : weights[j];
        kernels_.accumulate(w_->d + row * s_.h + column, weight, columns, sum);
      }
      kernels_.round(sum, columns, p_.type, y + column * Bytes(p_.type));
    }
  }

  const MoEShape s_;
  const MoEArguments& p_;
  const Kernels& kernels_;
  ExpertWeights gate_up_, down_;
  RowFormat format_;
  int64_t x_stride_, a_stride_;
  bool quantized_;
  int64_t gate_up_pairs_, down_pairs_, gate_up_step_, down_step_;
  int64_t round_tokens_ = 0;
  Workspace* w_ = nullptr;
  int64_t blocks_ = 0, rows_ = 0;  // of this round; written by Route, read by later phases
};

}  // namespace

int64_t MoEW4A16CpuWorkspace(const MoEShape& shape, const MoEArguments& arguments,
                             const Kernels& kernels, int64_t tokens) {
  return Layer(shape, arguments, kernels).WorkspaceBytes(tokens);
}

bool RunMoEW4A16Cpu(const MoEShape& shape, const MoEArguments& arguments, const Kernels& kernels,
                    ThreadPool& pool) {
  Layer layer(shape, arguments, kernels);
  if (!layer.Begin()) return false;
  layer.Run(pool);
  return true;
}

}  // namespace nvfp4::cpu
