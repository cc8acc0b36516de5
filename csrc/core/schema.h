// Defines an op from its schema's arguments, and checks the memory of every tensor before an op runs.
#pragma once

#include <string>
#include <vector>

#include "core/stable.h"

namespace rec_kernels {

struct ArgumentSchema {
  std::string name;
  bool written;  // the op changes this tensor
};
using OpSchema = std::vector<ArgumentSchema>;

// Notes the schema of an op, and returns it for StableLibrary::def. Messages name arguments by it.
const char* noted_schema(const char* schema);
// The arguments of an op whose schema has been noted.
RK_EXPORT const OpSchema& arguments_of(const char* op);

// Throws std::invalid_argument unless every tensor lies in its storage, which others may have freed or shrunk (FSDP
// does), and what the op writes to overlaps with no other argument. `tensors` has an element for every argument of the
// op, null where it is no tensor.
RK_EXPORT void check_memory(const OpSchema& schema, const Tensor* const* tensors);

template <class Library>
void define(Library& m, const std::string& schema) {
  m.def(noted_schema(schema.c_str()));
}

}  // namespace rec_kernels
