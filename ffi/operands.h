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
// of products, as in "2 m d + e" and "k/2". If an attribute says a size, the handler sets its
// letter (Call::Set).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
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
  kInTiles = 8,     // the last two dimensions are padded to whole tiles (Call::SetTile)
};

// What a layout pads the last two dimensions of a matrix to. Both are powers of two.
struct Tile {
  int64_t rows, columns;
};

// `multiple` is a power of two.
constexpr int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) & -multiple;
}

constexpr bool IsDigit(char c) { return c >= '0' && c <= '9'; }
constexpr bool IsLetter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}

// The length of the letter or the word with which `text` begins, as in "k" and "n1"; 0 for none.
constexpr size_t WordLength(std::string_view text) {
  size_t length = 0;
  while (length < text.size() &&
         (IsLetter(text[length]) || (length > 0 && IsDigit(text[length])))) {
    ++length;
  }
  return length;
}

// The number that `text` is; 0 if it is none.
constexpr int64_t NumberOf(std::string_view text) {
  int64_t number = 0;
  for (const char c : text) {
    if (!IsDigit(c)) return 0;
    number = 10 * number + c - '0';
  }
  return number;
}

// One dimension. Most of them are a word, or a word over a power of two.
struct Dim {
  std::string_view text;  // the word, or the whole sum of products
  bool is_word = false;
  int shift = 0;  // by which the size of the word is shifted to the right

  constexpr Dim() = default;
  constexpr explicit Dim(std::string_view sum) : text(sum) {
    const size_t length = WordLength(sum);
    if (length == 0) return;
    const int64_t divisor = length == sum.size() ? 1
                            : sum[length] == '/' ? NumberOf(sum.substr(length + 1))
                                                 : 0;
    while ((int64_t{1} << shift) < divisor) ++shift;
    is_word = divisor == int64_t{1} << shift;
    if (is_word) text = sum.substr(0, length);
  }
};

// The dimensions in one pair of brackets: what stands between commas.
struct Dims {
  static constexpr size_t kMost = 8;
  Dim at[kMost] = {};
  size_t count = 0;

  constexpr Dims() = default;
  constexpr explicit Dims(std::string_view text) {
    if (text.empty()) return;
    text = text.substr(1, text.find(']') - 1);
    while (!text.empty()) {
      const size_t comma = text.find(", ");
      const size_t end = comma < text.size() ? comma : text.size();
      at[count++] = Dim(text.substr(0, end));
      text.remove_prefix(end + 2 < text.size() ? end + 2 : text.size());
    }
  }
};

struct Operand {
  std::string_view name;
  TypeRule type;
  std::string_view dims;  // empty if the handler checks them itself
  int role;               // flags of Role
  Dims parts;             // of `dims`, for an operand that is given
  size_t empty_rank;      // of an operand that is left out; 0 if it may not be

  constexpr Operand(std::string_view name, TypeRule type, std::string_view dims,
                    int role = kOperand)
      : name(name),
        type(type),
        dims(dims),
        role(role),
        parts((role & kLetter) != 0 ? Dims() : Dims(dims)),
        empty_rank(dims.find(" or [") < dims.size()
                       ? Dims(dims.substr(dims.find(" or [") + 4)).count
                       : 0) {}

  // Whether dimension `i` may be larger than what the table says.
  constexpr bool IsPadded(size_t i) const { return (role & kInTiles) != 0 && i + 2 >= parts.count; }
};

// A letter of a table, and which row gives it its value: by its dimension `dim`, or as the sum that
// the letter is.
struct Letter {
  std::string_view name;
  const Operand* row = nullptr;  // null if the handler sets the value
  size_t place = 0;              // of the buffer of this row
  size_t dim = 0;
};

// A table as calls read it. The compiler makes it, since calls are many.
struct Table {
  static constexpr size_t kMostRows = 16, kMostLetters = 16, kNoLetter = kMostLetters;

  size_t operands = 0, results = 0;
  const Operand* rows[kMostRows] = {};            // of the operands, then of the results
  size_t letter_of[kMostRows][Dims::kMost] = {};  // kNoLetter for a sum of products
  size_t num_letters = 0;
  Letter letters[kMostLetters] = {};

  template <size_t kSize>
  constexpr explicit Table(const Operand (&table)[kSize]) {
    for (const Role role : {kOperand, kResult}) {
      for (const Operand& row : table) {
        if ((row.role & kLetter) != 0 || (row.role & kResult) != role) continue;
        rows[size()] = &row;
        ++(role == kResult ? results : operands);
      }
    }
    BindLetters(kGivesSizes);
    for (const Operand& row : table) {
      if ((row.role & kLetter) != 0) letters[num_letters++] = {row.name, &row};
    }
    BindLetters(0);
    for (size_t place = 0; place < size(); ++place) {
      for (size_t i = 0; i < rows[place]->parts.count; ++i) {
        const Dim& dim = rows[place]->parts.at[i];
        size_t& letter = letter_of[place][i];
        letter = dim.is_word ? Find(dim.text) : kNoLetter;
        if (letter == num_letters) letters[num_letters++] = {dim.text};
      }
    }
  }

  constexpr size_t size() const { return operands + results; }

  // The place of a letter, or the number of letters.
  constexpr size_t Find(std::string_view name) const {
    size_t at = 0;
    while (at < num_letters && letters[at].name != name) ++at;
    return at;
  }

 private:
  constexpr void BindLetters(int giving) {
    for (size_t place = 0; place < size(); ++place) {
      const Operand& row = *rows[place];
      if ((row.role & kGivesSizes) != giving || row.empty_rank > 0) continue;
      for (size_t i = 0; i < row.parts.count; ++i) {
        const Dim& dim = row.parts.at[i];
        const bool is_alone = dim.is_word && dim.shift == 0 && !row.IsPadded(i);
        if (!is_alone || Find(dim.text) < num_letters) continue;
        letters[num_letters++] = {dim.text, &row, place, i};
      }
    }
  }
};

// One call of a target: its buffers by name, and its sizes by letter.
class Call {
 public:
  // Reads the buffers, checks their types, and gives the letters their values. Buffers start at
  // multiples of `alignment` bytes.
  ffi::Error Read(const Table& table, const ffi::RemainingArgs& args,
                  const ffi::RemainingRets& rets, size_t alignment) {
    table_ = &table;
    alignment_ = alignment;
    if (args.size() != table.operands || rets.size() != table.results) {
      return Expected("call", Counts(table.operands, table.results),
                      Counts(args.size(), rets.size()));
    }
    for (size_t i = 0; i < table.operands; ++i) {
      auto operand = args.get<ffi::AnyBuffer>(i);
      if (operand.has_error()) return operand.error();
      buffers_[i] = operand.value();
    }
    for (size_t i = 0; i < table.results; ++i) {
      auto result = rets.get<ffi::AnyBuffer>(i);
      if (result.has_error()) return result.error();
      buffers_[table.operands + i] = *result.value();
    }
    // A row whose type is that of another one comes after that one.
    for (const bool depends : {false, true}) {
      for (size_t place = 0; place < table.size(); ++place) {
        if (table.rows[place]->type.name.empty() == depends) continue;
        if (!HasType(place)) return WrongType(place);
      }
    }
    // A wrong number of dimensions is an error here only if a letter has no value because of it.
    // Check reports others, and knows all letters.
    for (size_t i = 0; i < table.num_letters; ++i) {
      if (BindLetter(i)) continue;
      const Letter& letter = table.letters[i];
      return Expected(Name(*letter.row), std::to_string(letter.row->parts.count) + " dimensions",
                      DimsText(buffers_[letter.place]->dimensions()));
    }
    return ffi::Error::Success();
  }

  // Gives a letter the value that an attribute says, also if a row has given it another one.
  void Set(std::string_view letter, int64_t value) { Bind(table_->Find(letter), value); }

  // Says to what rows of kInTiles are padded. Without it, they are not padded.
  void SetTile(Tile tile) { tile_ = tile; }

  // Checks `limits`, then the dimensions of all buffers and where they start.
  ffi::Error Check(std::initializer_list<Limit> limits = {}) const {
    NVFP4_RETURN_IF_ERROR(Expect(limits));
    for (size_t place = 0; place < table_->size(); ++place) {
      if (!IsLeftOut(place) && !HasDims(place)) return WrongDims(place);
    }
    for (size_t place = 0; place < table_->size(); ++place) {
      if (!IsAligned(place)) return Misaligned(place);
    }
    is_checked_ = true;
    return ffi::Error::Success();
  }

  // Expects an operand that other calls may leave out.
  ffi::Error ExpectGiven(std::string_view name) const {
    const size_t place = PlaceOf(name);
    return HasDims(place) ? ffi::Error::Success() : WrongDims(place);
  }

  bool is_checked() const { return is_checked_; }

  ffi::AnyBuffer operator[](std::string_view name) const { return *buffers_[PlaceOf(name)]; }

  int64_t size(std::string_view letter) const { return SizeOf(table_->Find(letter)); }
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
    const ffi::AnyBuffer buffer = (*this)[name];
    return buffer.element_count() > 0 ? static_cast<const T*>(buffer.untyped_data()) : nullptr;
  }
  template <typename T = void>
  T* out(std::string_view name) const {
    return static_cast<T*>((*this)[name].untyped_data());
  }

 private:
  size_t PlaceOf(std::string_view name) const {
    for (size_t place = 0; place < table_->size(); ++place) {
      if (table_->rows[place]->name == name) return place;
    }
    std::abort();  // the table of this target has no such row
  }

  int64_t SizeOf(size_t letter) const {
    const bool is_known = letter < table_->num_letters && is_known_[letter];
    if (!is_known) std::abort();  // nothing gives this letter a value
    return sizes_[letter];
  }

  static std::string Counts(size_t operands, size_t results) {
    return std::to_string(operands) + " operands and " + std::to_string(results) + " results";
  }

  void Bind(size_t letter, int64_t value) {
    if (letter >= table_->num_letters) std::abort();  // the table of this target has no such letter
    sizes_[letter] = value;
    is_known_[letter] = true;
  }

  // Returns false if the row that gives the letter its value has not so many dimensions.
  bool BindLetter(size_t at) {
    const Letter& letter = table_->letters[at];
    if (letter.row == nullptr) return true;
    if ((letter.row->role & kLetter) != 0) {
      Bind(at, Evaluate(letter.row->dims));
      return true;
    }
    const ffi::Span<const int64_t> got = buffers_[letter.place]->dimensions();
    if (got.size() != letter.row->parts.count) return false;
    Bind(at, got[letter.dim]);
    return true;
  }

  bool HasType(size_t place) const {
    const TypeRule& rule = table_->rows[place]->type;
    const ffi::DataType got = buffers_[place]->element_type();
    const bool half = got == ffi::BF16 || got == ffi::F16, f32 = got == ffi::F32;
    switch (rule.kind) {
      case TypeRule::kExactly:
        return got == rule.type;
      case TypeRule::kActivation:
        return half || f32;
      case TypeRule::kHalf:
        return half;
      case TypeRule::kLike:
        return got == (*this)[rule.name].element_type();
      case TypeRule::kFloatOrLike:
        return f32 || got == (*this)[rule.name].element_type();
      default:
        return true;
    }
  }

  std::string TypesText(const TypeRule& rule) const {
    switch (rule.kind) {
      case TypeRule::kActivation:
        return "bfloat16, float16 or float32";
      case TypeRule::kHalf:
        return "bfloat16 or float16";
      case TypeRule::kLike:
        return TypeText((*this)[rule.name].element_type());
      case TypeRule::kFloatOrLike:
        return TypeText((*this)[rule.name].element_type()) + " or float32";
      default:
        return TypeText(rule.type);
    }
  }

  ffi::Error WrongType(size_t place) const {
    const Operand& row = *table_->rows[place];
    return Expected(row.name, TypesText(row.type), TypeText(buffers_[place]->element_type()));
  }

  bool IsLeftOut(size_t place) const {
    const size_t rank = table_->rows[place]->empty_rank;
    if (rank == 0) return false;
    const ffi::Span<const int64_t> got = buffers_[place]->dimensions();
    return got.size() == rank &&
           std::all_of(got.begin(), got.end(), [](int64_t dim) { return dim == 0; });
  }

  std::string Name(const Operand& row) const {
    const std::string name =
        std::string(row.name) + " " + std::string(row.dims.substr(0, row.dims.find(']') + 1));
    if ((row.role & kInTiles) == 0 || tile_.rows * tile_.columns == 1) return name;
    return name + " in tiles of " + std::to_string(tile_.rows) + " x " +
           std::to_string(tile_.columns);
  }

  bool HasDims(size_t place) const {
    const Operand& row = *table_->rows[place];
    if (row.dims.empty()) return true;
    const ffi::Span<const int64_t> got = buffers_[place]->dimensions();
    bool fits = got.size() == row.parts.count;
    for (size_t i = 0; fits && i < got.size(); ++i) fits = got[i] == Value(place, i);
    return fits;
  }

  ffi::Error WrongDims(size_t place) const {
    const Operand& row = *table_->rows[place];
    std::vector<int64_t> expected;
    for (size_t i = 0; i < row.parts.count; ++i) expected.push_back(Value(place, i));
    return Expected(Name(row), DimsText(expected), DimsText(buffers_[place]->dimensions()));
  }

  // Buffers start at a multiple of the size of their elements, too. XLA aligns them more strictly
  // than any kernel needs. If one is misaligned, a kernel would read wrong bytes, or its
  // instruction would fault and end the process.
  size_t AlignmentOf(size_t place) const {
    return std::max(alignment_, ffi::ByteWidth(buffers_[place]->element_type()));
  }

  size_t BytesPast(size_t place) const {
    const auto address = reinterpret_cast<uintptr_t>(buffers_[place]->untyped_data());
    return address & (AlignmentOf(place) - 1);
  }

  bool IsAligned(size_t place) const {
    return BytesPast(place) == 0 || buffers_[place]->element_count() == 0;
  }

  ffi::Error Misaligned(size_t place) const {
    return Expected(
        table_->rows[place]->name,
        "memory that starts at a multiple of " + std::to_string(AlignmentOf(place)) + " bytes",
        "memory that starts " + std::to_string(BytesPast(place)) + " bytes past such a multiple");
  }

  int64_t Value(size_t place, size_t i) const {
    const Operand& row = *table_->rows[place];
    const Dim& dim = row.parts.at[i];
    if (!dim.is_word) return Evaluate(dim.text);
    int64_t value = SizeOf(table_->letter_of[place][i]);
    if (row.IsPadded(i)) {
      value = RoundUp(value, i + 1 == row.parts.count ? tile_.columns : tile_.rows);
    }
    return value >> dim.shift;
  }

  // The value of a sum of products.
  int64_t Evaluate(std::string_view text) const {
    int64_t sum = 0, term = 1, sign = 1;
    for (size_t i = 0; i < text.size();) {
      const bool divides = text[i] == '/';
      if (divides) ++i;
      size_t end = i + WordLength(text.substr(i));
      if (text[i] == ' ') {
        ++i;
      } else if (text[i] == '+' || text[i] == '-') {
        sum += sign * term;
        term = 1;
        sign = text[i++] == '+' ? 1 : -1;
      } else if (end > i) {
        term *= size(text.substr(i, end - i));
        i = end;
      } else {
        while (end < text.size() && IsDigit(text[end])) ++end;
        const int64_t number = NumberOf(text.substr(i, end - i));
        term = divides ? term / number : term * number;
        i = end;
      }
    }
    return sum + sign * term;
  }

  const Table* table_ = nullptr;
  size_t alignment_ = 1;
  Tile tile_ = {1, 1};
  std::optional<ffi::AnyBuffer> buffers_[Table::kMostRows];
  int64_t sizes_[Table::kMostLetters];
  bool is_known_[Table::kMostLetters] = {};
  mutable bool is_checked_ = false;
};

}  // namespace nvfp4
