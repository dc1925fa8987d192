// The pybind11 module _core: host-side hot paths. Its typed face is pagedinfer/_core.pyi.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "cache/block_pool.h"

namespace py = pybind11;

namespace pagedinfer {
namespace {

// values[first..last) of a Python list of ints, without a look at the rest of it.
std::vector<int32_t> read_ints(const char* what, const py::list& values, int64_t first,
                               int64_t last) {
  const auto size = static_cast<int64_t>(values.size());
  if (first < 0 || first > last || last > size) {
    throw py::value_error(std::string(what) + " " + std::to_string(first) + " to " +
                          std::to_string(last) + " are not within a list of " +
                          std::to_string(size));
  }
  std::vector<int32_t> read(last - first);
  for (int64_t i = first; i < last; ++i) {
    int overflow = 0;
    const long value = PyLong_AsLongAndOverflow(PyList_GET_ITEM(values.ptr(), i), &overflow);
    if (value == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
    if (overflow != 0 || value != static_cast<int32_t>(value)) {
      throw py::value_error(std::string(what) + ": element " + std::to_string(i) +
                            " is not a 32-bit integer");
    }
    read[i - first] = static_cast<int32_t>(value);
  }
  return read;
}

py::tuple match(const BlockPool& pool, const py::list& tokens, int32_t num_full_blocks,
                const std::string& salt) {
  const std::vector<int32_t> values =
      read_ints("tokens", tokens, 0, static_cast<int64_t>(num_full_blocks) * pool.block_size());
  auto [here, below] = pool.match_tiers(values.data(), num_full_blocks, salt);
  return py::make_tuple(std::move(here), std::move(below));
}

void insert(BlockPool& pool, const py::list& table, int64_t first, int64_t last,
            const py::list& tokens, const std::string& salt) {
  const int64_t block_size = pool.block_size();
  const auto blocks = read_ints("blocks", table, first, last);
  const auto values = read_ints("tokens", tokens, first * block_size, last * block_size);
  const int32_t before = first == 0 ? -1 : read_ints("blocks", table, first - 1, first).front();
  pool.insert(before, blocks, values.data(), salt);
}

py::object transfer(BlockPool& pool, const BlockPool::BlockList& blocks, BlockPool& to) {
  std::optional<BlockPool::Transfer> result = pool.transfer(blocks, to);
  if (!result) return py::none();
  return py::make_tuple(std::move(result->blocks), std::move(result->copies));
}

int32_t int_attribute(PyObject* object, PyObject* name) {
  const auto value = py::reinterpret_steal<py::object>(PyObject_GetAttr(object, name));
  if (!value) throw py::error_already_set();
  return value.cast<int32_t>();
}

using Int32s = py::array_t<int32_t, py::array::c_style>;

// See _core.pyi.
bool pack_decodes(const py::list& requests, Int32s packed, const Int32s& num_known_tokens,
                  Int32s num_blocks, int32_t block_size) {
  static PyObject* const slot_name = PyUnicode_InternFromString("slot");
  static PyObject* const start_name = PyUnicode_InternFromString("start");
  static PyObject* const num_tokens_name = PyUnicode_InternFromString("num_tokens");
  static PyObject* const new_block_ids_name = PyUnicode_InternFromString("new_block_ids");
  const auto count = static_cast<py::ssize_t>(requests.size());
  auto rows = packed.mutable_unchecked<2>();
  if (rows.shape(0) != 3 || rows.shape(1) != count) {
    throw py::value_error("packed must be [3, " + std::to_string(count) + "], got [" +
                          std::to_string(rows.shape(0)) + ", " + std::to_string(rows.shape(1)) +
                          "]");
  }
  const auto known = num_known_tokens.unchecked<1>();
  auto blocks = num_blocks.mutable_unchecked<1>();
  const py::ssize_t num_slots = std::min(known.shape(0), blocks.shape(0));
  for (py::ssize_t i = 0; i < count; ++i) {
    PyObject* const request = PyList_GET_ITEM(requests.ptr(), i);
    if (int_attribute(request, num_tokens_name) != 1) return false;
    const int32_t slot = int_attribute(request, slot_name);
    const int32_t start = int_attribute(request, start_name);
    if (slot < 0 || slot >= num_slots) {
      throw py::value_error("slot " + std::to_string(slot) + " is none of " +
                            std::to_string(num_slots));
    }
    if (start < known(slot)) return false;
    const auto new_blocks =
        py::reinterpret_steal<py::object>(PyObject_GetAttr(request, new_block_ids_name));
    if (!new_blocks) throw py::error_already_set();
    const auto list = new_blocks.cast<py::list>();
    rows(0, i) = slot;
    rows(1, i) = start + 1;
    rows(2, i) = -1;
    if (list.empty()) continue;
    if (list.size() > 1 || blocks(slot) != start / block_size) return false;
    rows(2, i) = list[0].cast<int32_t>();
  }
  for (py::ssize_t i = 0; i < count; ++i) {
    if (rows(2, i) >= 0) ++blocks(rows(0, i));
  }
  return true;
}

}  // namespace
}  // namespace pagedinfer

PYBIND11_MODULE(_core, m) {
  using pagedinfer::BlockPool;
  m.doc() = "Host-side hot paths of pagedinfer.";
  m.def("pack_decodes", &pagedinfer::pack_decodes, py::arg("requests"),
        py::arg("packed").noconvert(), py::arg("num_known_tokens").noconvert(),
        py::arg("num_blocks").noconvert(), py::arg("block_size"));

  py::class_<BlockPool>(m, "BlockPool")
      .def(py::init<int32_t, int32_t, int>(), py::arg("num_blocks"), py::arg("block_size"),
           py::kw_only(), py::arg("hash_bits") = 64)
      .def_property_readonly("num_blocks", &BlockPool::num_blocks)
      .def_property_readonly("block_size", &BlockPool::block_size)
      .def_property_readonly("num_free", &BlockPool::num_free)
      .def_property_readonly("num_cached", &BlockPool::num_cached)
      .def("ref_count", &BlockPool::ref_count, py::arg("block"))
      .def("is_cached", &BlockPool::is_cached, py::arg("block"))
      .def("hash", &BlockPool::hash, py::arg("block"))
      .def("num_unreferenced", &BlockPool::num_unreferenced, py::arg("blocks"))
      .def("allocate", &BlockPool::allocate, py::arg("n"))
      .def("acquire", &BlockPool::acquire, py::arg("blocks"))
      .def("release", &BlockPool::release, py::arg("blocks"))
      .def("match", &pagedinfer::match, py::arg("tokens"), py::arg("num_full_blocks"),
           py::arg("salt") = "")
      .def("insert", &pagedinfer::insert, py::arg("table"), py::arg("first"), py::arg("last"),
           py::arg("tokens"), py::arg("salt") = "")
      .def("forget", &BlockPool::forget, py::arg("blocks"))
      .def("reset_cache", &BlockPool::reset_cache)
      .def("set_lower_tier", &BlockPool::set_lower_tier, py::arg("lower"), py::keep_alive<1, 2>())
      .def("take_demotions", &BlockPool::take_demotions)
      .def("transfer", &pagedinfer::transfer, py::arg("blocks"), py::arg("to"))
      .def("check", &BlockPool::check);
}
