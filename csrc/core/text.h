// Formats messages only on failure: a check that passes costs a branch, and call sites compile no standard streams.
#pragma once

#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <string>
#include <type_traits>

namespace rec_kernels {

// A part of a message: a reference to the caller's text, or a number.
class Piece {
 public:
  Piece(const char* text) : text_(text), size_(std::char_traits<char>::length(text)) {}
  Piece(const std::string& text) : text_(text.data()), size_(text.size()) {}
  template <class Number, class = std::enable_if_t<std::is_arithmetic_v<Number> && !std::is_same_v<Number, char>>>
  Piece(Number number) : kind_(kind_of<Number>()) {
    if constexpr (std::is_floating_point_v<Number>) real_ = number;
    else integer_ = static_cast<int64_t>(number);
  }

  void append_to(std::string& message) const {
    if (kind_ == Kind::kText) message.append(text_, size_);
    else if (kind_ == Kind::kSigned) message += std::to_string(integer_);
    else if (kind_ == Kind::kUnsigned) message += std::to_string(static_cast<uint64_t>(integer_));
    else append_real(message);
  }

 private:
  enum class Kind { kText, kSigned, kUnsigned, kReal };

  template <class Number>
  static constexpr Kind kind_of() {
    if (std::is_floating_point_v<Number>) return Kind::kReal;
    return std::is_signed_v<Number> ? Kind::kSigned : Kind::kUnsigned;
  }
  void append_real(std::string& message) const {
    char digits[32];
    const int count = std::snprintf(digits, sizeof digits, "%g", real_);
    message.append(digits, static_cast<size_t>(count));
  }

  Kind kind_ = Kind::kText;
  const char* text_ = nullptr;
  size_t size_ = 0;
  int64_t integer_ = 0;
  double real_ = 0;
};

inline std::string join_pieces(std::initializer_list<Piece> pieces) {
  std::string message;
  for (const Piece& piece : pieces) piece.append_to(message);
  return message;
}

template <class... Parts>
std::string join(const Parts&... parts) {
  return join_pieces({Piece(parts)...});
}

}  // namespace rec_kernels
