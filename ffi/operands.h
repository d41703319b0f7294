// The operands of an FFI target as a table, with one row for each operand and result. The row has
// its name, its element type and its dimensions by letters. Checks and messages are made from it:
//
//   constexpr Operand kOperands[] = {
//       {"x", kHalf, "[rows, k]"},
//       {"weight", Like("x"), "[n, k]"},
//       {"bias", kF32, "[n] or [0]"},
//       {"y", Like("x"), "[rows, n]", kResult},
//   };
//
// A handler gets a Call. It reads sizes from it, and has to call Call::Check with their limits.
//
// A letter stands for a size. Rows that have a letter or a word alone as a dimension give it its
// value, the first one first, unless they may be left out ("or [0]"). A dimension may also be a sum
// of products, as in "2 m d + e" and "k/2".
#pragma once

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checks.h"
#include "shapes.h"
#include "xla/ffi/api/ffi.h"

namespace nvfp4 {

// What the element type of an operand may be.
struct TypeRule {
  enum Kind { kExactly, kActivation, kHalf, kLike, kFloatOrLike, kAny } kind;
  ffi::DataType type = ffi::DataType::INVALID;  // under kExactly
  std::string_view name = "";                   // of the operand that has the type, under kLike
};

constexpr TypeRule kBF16 = {TypeRule::kExactly, ffi::BF16};
constexpr TypeRule kF32 = {TypeRule::kExactly, ffi::F32};
constexpr TypeRule kE4M3 = {TypeRule::kExactly, ffi::F8E4M3FN};
constexpr TypeRule kS32 = {TypeRule::kExactly, ffi::S32};
constexpr TypeRule kU8 = {TypeRule::kExactly, ffi::U8};
constexpr TypeRule kActivation = {TypeRule::kActivation};  // bfloat16, float16 or float32
constexpr TypeRule kHalf = {TypeRule::kHalf};              // bfloat16 or float16
constexpr TypeRule kAnyType = {TypeRule::kAny};
constexpr TypeRule Like(std::string_view name) {
  return {TypeRule::kLike, ffi::DataType::INVALID, name};
}
constexpr TypeRule F32OrLike(std::string_view name) {
  return {TypeRule::kFloatOrLike, ffi::DataType::INVALID, name};
}

enum Role {
  kOperand = 0,
  kResult = 1,
  kGivesSizes = 2,  // gives letters their values before other rows do
  kLetter = 4,      // no operand, but a letter: the sum of products that `dims` is
};

constexpr bool IsLetter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}

// The dimensions in one pair of brackets: what stands between commas.
struct Dims {
  static constexpr size_t kMost = 8;
  std::string_view at[kMost] = {};
  bool alone[kMost] = {};  // whether a dimension is a letter or a word and nothing else
  size_t count = 0;

  constexpr Dims() = default;
  constexpr explicit Dims(std::string_view text) {
    if (text.empty()) return;
    text = text.substr(1, text.find(']') - 1);
    while (!text.empty()) {
      const size_t comma = text.find(", ");
      const size_t end = comma < text.size() ? comma : text.size();
      at[count] = text.substr(0, end);
      alone[count] = true;
      for (const char c : at[count]) alone[count] = alone[count] && IsLetter(c);
      ++count;
      text.remove_prefix(end + 2 < text.size() ? end + 2 : text.size());
    }
  }
};

struct Operand {
  std::string_view name;
  TypeRule type;
  std::string_view dims;  // empty if the handler checks them itself
  int role;               // flags of Role
  Dims parts;             // of `dims`; read by the compiler, since calls are many
  Dims empty;             // those behind "or", all of them 0; none if it may not be left out

  constexpr Operand(std::string_view name, TypeRule type, std::string_view dims,
                    int role = kOperand)
      : name(name),
        type(type),
        dims(dims),
        role(role),
        parts((role & kLetter) != 0 ? Dims() : Dims(dims)),
        empty(dims.find(" or [") < dims.size() ? Dims(dims.substr(dims.find(" or [") + 4))
                                               : Dims()) {}
};

// A limit of a size or of an attribute.
struct Limit {
  enum Kind { kLeast, kMost, kFactor } kind;
  std::string_view what;
  int64_t got, bound;
};

constexpr Limit AtLeast(std::string_view what, int64_t got, int64_t least) {
  return {Limit::kLeast, what, got, least};
}
constexpr Limit AtMost(std::string_view what, int64_t got, int64_t most) {
  return {Limit::kMost, what, got, most};
}
constexpr Limit MultipleOf(std::string_view what, int64_t got, int64_t factor) {
  return {Limit::kFactor, what, got, factor};
}

// Returns an error for the first limit that is not kept.
inline ffi::Error Expect(std::initializer_list<Limit> limits) {
  for (const Limit& limit : limits) {
    const auto expect = limit.kind == Limit::kLeast  ? ExpectAtLeast
                        : limit.kind == Limit::kMost ? ExpectAtMost
                                                     : ExpectMultipleOf;
    NVFP4_RETURN_IF_ERROR(expect(limit.what, limit.got, limit.bound));
  }
  return ffi::Error::Success();
}

// One call of a target: its buffers by name, and its sizes by letter.
class Call {
 public:
  // Reads the buffers, checks their types, and gives the letters their values. Buffers start at
  // multiples of `alignment` bytes.
  template <size_t kSize>
  ffi::Error Read(const Operand (&table)[kSize], const ffi::RemainingArgs& args,
                  const ffi::RemainingRets& rets, size_t alignment) {
    alignment_ = alignment;
    size_t operands = 0, results = 0;
    for (const Operand& row : table) {
      if ((row.role & kLetter) == 0) ++((row.role & kResult) != 0 ? results : operands);
    }
    if (args.size() != operands || rets.size() != results) {
      return Expected("call", Counts(operands, results), Counts(args.size(), rets.size()));
    }
    operands = results = 0;
    rows_.reserve(kSize);
    sizes_.reserve(2 * kSize);
    for (const Operand& row : table) {
      if ((row.role & kLetter) != 0) {
        letters_.push_back(&row);
      } else if ((row.role & kResult) != 0) {
        auto result = rets.get<ffi::AnyBuffer>(results++);
        if (result.has_error()) return result.error();
        rows_.push_back({&row, *result.value()});
      } else {
        auto operand = args.get<ffi::AnyBuffer>(operands++);
        if (operand.has_error()) return operand.error();
        rows_.push_back({&row, operand.value()});
      }
    }
    // A row whose type is that of another one comes after that one.
    for (const bool depends : {false, true}) {
      for (const Row& row : rows_) {
        if (row.operand->type.name.empty() != depends) NVFP4_RETURN_IF_ERROR(CheckType(row));
      }
    }
    NVFP4_RETURN_IF_ERROR(BindLetters(kGivesSizes));
    for (const Operand* letter : letters_) {
      sizes_.emplace_back(letter->name, Evaluate(letter->dims));
    }
    return BindLetters(0);
  }

  // Checks `limits`, then the dimensions of all buffers and where they start.
  ffi::Error Check(std::initializer_list<Limit> limits = {}) const {
    NVFP4_RETURN_IF_ERROR(Expect(limits));
    for (const Row& row : rows_) NVFP4_RETURN_IF_ERROR(CheckDims(row));
    for (const Row& row : rows_) {
      NVFP4_RETURN_IF_ERROR(ExpectAligned({{row.operand->name, row.buffer}}, alignment_));
    }
    is_checked_ = true;
    return ffi::Error::Success();
  }

  bool is_checked() const { return is_checked_; }

  ffi::AnyBuffer operator[](std::string_view name) const {
    for (const Row& row : rows_) {
      if (row.operand->name == name) return row.buffer;
    }
    std::abort();  // the table of this target has no such row
  }

  int64_t size(std::string_view letter) const {
    const int64_t* value = Find(letter);
    if (value == nullptr) std::abort();  // no row has this letter alone
    return *value;
  }
  int32_t size32(std::string_view letter) const { return static_cast<int32_t>(size(letter)); }

  // The type of an operand whose rule is kActivation, kHalf, or another float type.
  DataType type(std::string_view name) const {
    switch ((*this)[name].element_type()) {
      case ffi::BF16:
        return DataType::kBF16;
      case ffi::F16:
        return DataType::kF16;
      case ffi::F8E4M3FN:
        return DataType::kE4M3;
      default:
        return DataType::kF32;
    }
  }

  bool has(std::string_view name) const { return (*this)[name].element_count() > 0; }

  template <typename T = float>
  const T* in(std::string_view name) const {
    return static_cast<const T*>((*this)[name].untyped_data());
  }
  // Null if the operand was left out.
  template <typename T = float>
  const T* in_or_null(std::string_view name) const {
    return has(name) ? in<T>(name) : nullptr;
  }
  template <typename T = void>
  T* out(std::string_view name) const {
    return static_cast<T*>((*this)[name].untyped_data());
  }

 private:
  struct Row {
    const Operand* operand;
    ffi::AnyBuffer buffer;
  };

  static std::string Counts(size_t operands, size_t results) {
    return std::to_string(operands) + " operands and " + std::to_string(results) + " results";
  }

  ffi::Error BindLetters(int giving) {
    for (const Row& row : rows_) {
      if ((row.operand->role & kGivesSizes) == giving) NVFP4_RETURN_IF_ERROR(BindLetters(row));
    }
    return ffi::Error::Success();
  }

  ffi::Error CheckType(const Row& row) const {
    const TypeRule& rule = row.operand->type;
    const ffi::DataType got = row.buffer.element_type();
    const bool half = got == ffi::BF16 || got == ffi::F16, f32 = got == ffi::F32;
    switch (rule.kind) {
      case TypeRule::kExactly:
        return ExpectType(row.operand->name, got, rule.type);
      case TypeRule::kActivation:
        if (half || f32) return ffi::Error::Success();
        return Expected(row.operand->name, "bfloat16, float16 or float32", TypeText(got));
      case TypeRule::kHalf:
        if (half) return ffi::Error::Success();
        return Expected(row.operand->name, "bfloat16 or float16", TypeText(got));
      case TypeRule::kLike:
        return ExpectType(row.operand->name, got, (*this)[rule.name].element_type());
      case TypeRule::kFloatOrLike:
        if (f32 || got == (*this)[rule.name].element_type()) return ffi::Error::Success();
        return Expected(row.operand->name,
                        TypeText((*this)[rule.name].element_type()) + " or float32", TypeText(got));
      default:
        return ffi::Error::Success();
    }
  }

  static bool IsLeftOut(const Row& row) {
    const size_t empty = row.operand->empty.count;
    const ffi::Span<const int64_t> got = row.buffer.dimensions();
    return empty > 0 && got.size() == empty &&
           std::all_of(got.begin(), got.end(), [](int64_t dim) { return dim == 0; });
  }

  static std::string Name(const Row& row) {
    const std::string_view dims = row.operand->dims;
    return std::string(row.operand->name) + " " + std::string(dims.substr(0, dims.find(']') + 1));
  }

  const int64_t* Find(std::string_view letter) const {
    for (const auto& [name, value] : sizes_) {
      if (name == letter) return &value;
    }
    return nullptr;
  }

  ffi::Error BindLetters(const Row& row) {
    if (row.operand->dims.empty() || IsLeftOut(row)) return ffi::Error::Success();
    const Dims& parts = row.operand->parts;
    const ffi::Span<const int64_t> got = row.buffer.dimensions();
    if (got.size() != parts.count) return ExpectRank(Name(row), got, parts.count);
    if (row.operand->empty.count > 0) return ffi::Error::Success();
    for (size_t i = 0; i < parts.count; ++i) {
      if (parts.alone[i] && Find(parts.at[i]) == nullptr) sizes_.emplace_back(parts.at[i], got[i]);
    }
    return ffi::Error::Success();
  }

  ffi::Error CheckDims(const Row& row) const {
    if (row.operand->dims.empty() || IsLeftOut(row)) return ffi::Error::Success();
    const Dims& parts = row.operand->parts;
    const ffi::Span<const int64_t> got = row.buffer.dimensions();
    bool fits = true;
    for (size_t i = 0; i < parts.count; ++i) fits = fits && got[i] == Value(parts, i);
    if (fits) return ffi::Error::Success();
    std::vector<int64_t> expected;
    for (size_t i = 0; i < parts.count; ++i) expected.push_back(Value(parts, i));
    return Expected(Name(row), DimsText(expected), DimsText(got));
  }

  int64_t Value(const Dims& parts, size_t i) const {
    return parts.alone[i] ? size(parts.at[i]) : Evaluate(parts.at[i]);
  }

  // The value of a sum of products.
  int64_t Evaluate(std::string_view text) const {
    int64_t sum = 0, term = 1, sign = 1;
    for (size_t i = 0; i < text.size();) {
      const bool divides = text[i] == '/';
      if (divides) ++i;
      size_t end = i;
      if (text[i] == ' ') {
        ++i;
      } else if (text[i] == '+' || text[i] == '-') {
        sum += sign * term;
        term = 1;
        sign = text[i++] == '+' ? 1 : -1;
      } else if (IsLetter(text[i])) {
        while (end < text.size() && IsLetter(text[end])) ++end;
        term *= size(text.substr(i, end - i));
        i = end;
      } else {
        int64_t number = 0;
        while (end < text.size() && std::isdigit(text[end]))
          number = 10 * number + text[end++] - '0';
        term = divides ? term / number : term * number;
        i = end;
      }
    }
    return sum + sign * term;
  }

  std::vector<Row> rows_;
  std::vector<const Operand*> letters_;
  size_t alignment_ = 1;
  mutable bool is_checked_ = false;
  std::vector<std::pair<std::string_view, int64_t>> sizes_;
};

}  // namespace nvfp4
