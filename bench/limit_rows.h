// Rows of floats as the bare loops have them: lines of 16 numbers, a cache line each.
#pragma once

#include <cstdint>
#include <type_traits>

typedef float Line __attribute__((vector_size(64), aligned(4)));

// Calls `function` with the lines of a row of `dim` floats as a constant; returns 0 for a width that no loop has.
template <typename Function>
int with_lines(int64_t dim, const Function& function) {
  switch (dim) {
    case 16:
      function(std::integral_constant<int, 1>{});
      return 1;
    case 32:
      function(std::integral_constant<int, 2>{});
      return 1;
    case 64:
      function(std::integral_constant<int, 4>{});
      return 1;
    case 128:
      function(std::integral_constant<int, 8>{});
      return 1;
    case 256:
      function(std::integral_constant<int, 16>{});
      return 1;
    default:
      return 0;
  }
}
