// Python module `rec_kernels._host`: stateful host objects that cannot be tensors.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "host/checksum.h"
#include "host/row_file.h"
#include "host/row_file_docs.h"
#include "host/without_gil.h"

namespace py = pybind11;

namespace rec_kernels::host {
namespace {

// A forked process has a copy of the object without its threads, and can neither use nor destroy it.
struct DeleteInOwnerProcess {
  void operator()(RowFile* file) const {
    if (file->is_owner_process()) delete file;
  }
};
using Handle = std::unique_ptr<RowFile, DeleteInOwnerProcess>;

// Throws ValueError on behalf of the op libraries, which do not link Python (csrc/core/errors.cpp).
[[noreturn]] void throw_value_error(const char* message) { throw py::value_error(message); }

std::string file_path(const py::object& path) {
  const py::object bytes = py::module_::import("os").attr("fsencode")(path);
  const std::string text = bytes.cast<std::string>();
  check_value(text.find('\0') == std::string::npos, "path must not contain a zero byte");
  return text;
}

// Messages may quote paths and file contents, which may not be valid UTF-8.
py::object text_of(const std::string& text) {
  return py::reinterpret_steal<py::object>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
}

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const SystemError& e) {
    const auto path = py::reinterpret_steal<py::object>(
        PyUnicode_DecodeFSDefaultAndSize(e.path().data(), static_cast<Py_ssize_t>(e.path().size())));
    const py::tuple arguments = py::make_tuple(e.code(), text_of(e.what()), path);
    PyErr_SetObject(PyExc_OSError, arguments.ptr());
  } catch (const BudgetError& e) {
    PyErr_SetObject(PyExc_MemoryError, text_of(e.what()).ptr());
  } catch (const std::invalid_argument& e) {
    PyErr_SetObject(PyExc_ValueError, text_of(e.what()).ptr());
  } catch (const std::out_of_range& e) {
    PyErr_SetObject(PyExc_IndexError, text_of(e.what()).ptr());
  }
}

int64_t threads_or_default(const std::optional<int64_t>& threads) {
  return threads.value_or(std::min<int64_t>(8, 2 * std::max(1u, std::thread::hardware_concurrency())));
}

using Integers = py::array_t<int64_t, py::array::c_style>;

Integers integers(const py::object& argument, const char* name) {
  const py::array array = py::array::ensure(argument);
  if (!array) throw py::type_error(join(name, " must be an array of int64"));
  if (array.ndim() != 1) throw std::invalid_argument(join(name, " must have 1 dimension, got ", array.ndim()));
  if (array.size() == 0) return Integers(0);  // any dtype: numpy converts an empty list to float64
  if (!array.dtype().is(py::dtype::of<int64_t>()) && !array.dtype().equal(py::dtype::of<int64_t>()))
    throw py::type_error(join(name, " must be int64, got ", std::string(py::str(array.dtype()))));
  return Integers(array);
}

int64_t whole_number(const py::object& number) {
  const auto whole = py::reinterpret_steal<py::object>(PyNumber_Index(number.ptr()));
  if (!whole) throw py::error_already_set();
  const int64_t value = PyLong_AsLongLong(whole.ptr());
  if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
  return value;
}

std::vector<Span> spans_of(const RowFile& file, const py::object& starts, const py::object& sizes) {
  const Integers first = integers(starts, "starts");
  const py::array given = py::array::ensure(sizes);
  const bool one_size = given && given.ndim() == 0;
  const int64_t size = one_size ? whole_number(sizes) : 0;
  const Integers each = one_size ? Integers(0) : integers(sizes, "sizes");
  check_value(one_size || each.size() == first.size(), "sizes must be one integer or have as many elements as starts, ",
              first.size(), ", got ", each.size());
  const int64_t* const first_data = first.data();
  const int64_t* const size_data = one_size ? &size : each.data();
  const WithoutGil released;
  return file.spans(first_data, size_data, first.size(), one_size);
}

// Calls a method whose first argument is spans.
template <auto kMethod, class... More>
void with_spans(RowFile& file, const py::object& starts, const py::object& sizes, More... more) {
  const std::vector<Span> spans = spans_of(file, starts, sizes);
  const WithoutGil released;
  (file.*kMethod)(spans, more...);
}

Handle create(const py::object& path, int64_t num_bytes, const std::string& layout, int64_t memory_budget,
              const std::optional<int64_t>& block_bytes, const std::optional<int64_t>& threads) {
  const std::string name = file_path(path);
  const int64_t block = block_bytes.value_or(std::max<int64_t>(4096, Window::page_bytes()));
  const WithoutGil released;
  return Handle(RowFile::create(name, num_bytes, block, layout, memory_budget, threads_or_default(threads)).release());
}

Handle open(const py::object& path, const std::string& layout, int64_t memory_budget,
            const std::optional<int64_t>& threads, const std::optional<int64_t>& generation) {
  const std::string name = file_path(path);
  const WithoutGil released;
  return Handle(RowFile::open(name, layout, memory_budget, threads_or_default(threads), generation).release());
}

// The window as an array that owns a reference to it.
py::array_t<uint8_t> window(const RowFile& file) {
  auto owner = std::make_unique<std::shared_ptr<Window>>(file.window());
  uint8_t* const data = (*owner)->data();
  const py::capsule base(owner.release(), [](void* p) { delete static_cast<std::shared_ptr<Window>*>(p); });
  return py::array_t<uint8_t>(file.num_bytes(), data, base);
}

py::dict stats(const RowFile& file) {
  const RowFileStats s = file.stats();
  py::dict d;
  d["loads"] = s.loads;
  d["hits"] = s.hits;
  d["prefetched"] = s.prefetched;
  d["blocks_read"] = s.blocks_read;
  d["blocks_written"] = s.blocks_written;
  d["bytes_read"] = s.blocks_read * file.block_bytes();
  d["bytes_written"] = s.blocks_written * file.block_bytes();
  d["resident_bytes"] = s.resident_bytes;
  d["dirty_bytes"] = s.dirty_bytes;
  d["log_bytes"] = s.log_bytes;
  d["bookkeeping_bytes"] = s.bookkeeping_bytes;
  return d;
}

void define_row_file(py::module_& module) {
  using released = py::call_guard<WithoutGil>;
  using namespace py::literals;  // "name"_a
  py::class_<RowFile, Handle>(module, "RowFile", row_file_docs::kClass)
      .def_static("create", &create, "path"_a, "num_bytes"_a, py::kw_only(), "layout"_a, "memory_budget"_a,
                  "block_bytes"_a = py::none(), "threads"_a = py::none(), row_file_docs::kCreate)
      .def_static("open", &open, "path"_a, py::kw_only(), "layout"_a, "memory_budget"_a, "threads"_a = py::none(),
                  "generation"_a = py::none(), row_file_docs::kOpen)
      .def_property_readonly("window", &window, row_file_docs::kWindow)
      .def("load", &with_spans<&RowFile::load, bool>, "starts"_a, "sizes"_a, py::kw_only(), "write"_a = false,
           row_file_docs::kLoad)
      .def("prefetch", &with_spans<&RowFile::prefetch>, "starts"_a, "sizes"_a, row_file_docs::kPrefetch)
      .def("mark_dirty", &with_spans<&RowFile::mark_dirty>, "starts"_a, "sizes"_a, row_file_docs::kMarkDirty)
      .def("unpin", &RowFile::unpin, released(), row_file_docs::kUnpin)
      .def("cancel_prefetch", &RowFile::cancel_prefetch, released(), row_file_docs::kCancelPrefetch)
      .def("flush", &RowFile::flush, py::kw_only(), "apply"_a = true, released(), row_file_docs::kFlush)
      .def("apply", &RowFile::apply, released(), row_file_docs::kApply)
      .def("close", &RowFile::close, released(), row_file_docs::kClose)
      .def("__enter__", [](const py::object& file) { return file; })
      .def("__exit__",
           [](RowFile& file, const py::args&) {
             const WithoutGil without_gil;
             file.close();
           })
      .def("stats", &stats, row_file_docs::kStats)
      .def_property_readonly("closed", &RowFile::closed)
      .def_property_readonly("generation", &RowFile::generation, row_file_docs::kGeneration)
      .def_property_readonly("identity", &RowFile::identity, row_file_docs::kIdentity)
      .def_property_readonly(
          "path", [](const RowFile& f) { return py::module_::import("os").attr("fsdecode")(py::bytes(f.path())); })
      .def_property_readonly("num_bytes", &RowFile::num_bytes)
      .def_property_readonly("block_bytes", &RowFile::block_bytes)
      .def_property_readonly("memory_budget", &RowFile::memory_budget);
}

}  // namespace
}  // namespace rec_kernels::host

PYBIND11_MODULE(_host, module) {
  namespace host = rec_kernels::host;
  module.doc() = "Stateful host objects. RowFile keeps embedding tables in a file and uses a bounded amount of memory.";
  py::register_local_exception_translator(&host::translate);
  host::define_row_file(module);
  module.def(
      "crc32c",
      [](const py::bytes& data, bool by_table) {
        const std::string_view bytes = data;
        return by_table ? host::crc32c_by_table(bytes.data(), bytes.size()) : host::crc32c(bytes.data(), bytes.size());
      },
      py::arg("data"), py::kw_only(), py::arg("by_table") = false,
      "Returns the CRC32C of bytes, as in row files; ``by_table`` avoids the CPU's instruction.");
  module.def(
      "value_error_thrower", [] { return reinterpret_cast<uintptr_t>(&host::throw_value_error); },
      "Returns the address of a C++ function that throws ValueError with a C string as its message.");
}
