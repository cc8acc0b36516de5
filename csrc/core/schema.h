// Defines ops from their schemas, and checks the memory of every tensor before an op runs.
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

// Registers the schema of an op, from which messages take argument names; returns it for StableLibrary::def.
const char* noted_schema(const char* schema);
// The arguments of an op with a registered schema.
RK_EXPORT const OpSchema& arguments_of(const char* op);

// Throws std::invalid_argument unless every tensor is within its storage, which other code may have freed or shrunk (as
// FSDP does), and no written argument overlaps another argument. `tensors` has one element per argument of the op, null
// for arguments that are not tensors.
RK_EXPORT void check_memory(const OpSchema& schema, const Tensor* const* tensors);

template <class Library>
void define(Library& m, const std::string& schema) {
  m.def(noted_schema(schema.c_str()));
}

}  // namespace rec_kernels
