#include "common/check.h"

#include <cmath>
#include <cstdlib>

namespace pagedinfer {

namespace {

template <typename Values>
std::string joined(const Values& values) {
  std::ostringstream out;
  out << '[';
  bool first = true;
  for (auto value : values) {
    if (!first) out << ", ";
    out << value;
    first = false;
  }
  out << ']';
  return out.str();
}

}  // namespace

float checked_epsilon(const char* op, double epsilon) {
  const auto value = static_cast<float>(epsilon);
  PAGEDINFER_CHECK(std::isfinite(value) && value >= 0, op, ": epsilon is ", epsilon,
                   "; expected a finite float32 >= 0");
  return value;
}

const char* name_of(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Bool:
      return "bool";
    default:
      return "another dtype";
  }
}

std::string shape_of(const Tensor& tensor) { return joined(tensor.sizes()); }

std::string device_of(const Tensor& tensor) {
  if (is_cpu(tensor)) return "cpu";
  std::ostringstream out;
  out << (tensor.is_cuda() ? "cuda:" : "device:") << tensor.get_device_index();
  return out.str();
}

bool is_cpu(const Tensor& tensor) { return tensor.is_cpu(); }

void ArgumentChecker::shape(const char* name, const Tensor& tensor,
                            std::initializer_list<const char*> dims) {
  bool matches = tensor.dim() == static_cast<int64_t>(dims.size());
  std::vector<std::string> expected;
  int64_t i = 0;
  for (const char* dim : dims) {
    int64_t actual = i < tensor.dim() ? tensor.size(i) : -1;
    ++i;
    if (dim[0] >= '0' && dim[0] <= '9') {
      expected.emplace_back(dim);
      matches &= actual == std::atoll(dim);
      continue;
    }
    const int64_t* known = nullptr;
    for (const auto& entry : sizes_) {
      if (entry.first == dim) known = &entry.second;
    }
    expected.push_back(known ? std::string(dim) + "=" + std::to_string(*known) : std::string(dim));
    if (known) {
      matches &= actual == *known;
    } else if (matches) {
      sizes_.emplace_back(dim, actual);
    }
  }
  PAGEDINFER_CHECK(matches, op_, ": ", name, " has shape ", shape_of(tensor), "; expected ",
                   joined(expected));
}

DType ArgumentChecker::float_dtype(const char* name, const Tensor& tensor) {
  DType found{};
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      found = DType::float32;
      break;
    case ScalarType::Half:
      found = DType::float16;
      break;
    case ScalarType::BFloat16:
      found = DType::bfloat16;
      break;
    default:
      PAGEDINFER_CHECK(false, op_, ": ", name, " has dtype ", name_of(tensor.scalar_type()),
                       "; expected float32, float16 or bfloat16");
  }
  if (!has_dtype_) {
    has_dtype_ = true;
    dtype_ = found;
    dtype_from_ = std::string(name) + "'s " + name_of(tensor.scalar_type());
  }
  PAGEDINFER_CHECK(found == dtype_, op_, ": ", name, " has dtype ", name_of(tensor.scalar_type()),
                   "; expected ", dtype_from_);
  return found;
}

void ArgumentChecker::dtype(const char* name, const Tensor& tensor, ScalarType expected) {
  PAGEDINFER_CHECK(tensor.scalar_type() == expected, op_, ": ", name, " has dtype ",
                   name_of(tensor.scalar_type()), "; expected ", name_of(expected));
}

void ArgumentChecker::same_device(const char* name, const Tensor& tensor) {
  std::string device = device_of(tensor);
  if (!has_device_) {
    has_device_ = true;
    device_ = device;
    device_from_ = name;
  }
  PAGEDINFER_CHECK(device == device_, op_, ": ", name, " is on ", device, "; expected ", device_,
                   ", where ", device_from_, " is");
}

void ArgumentChecker::on_cpu(const char* name, const Tensor& tensor) {
  PAGEDINFER_CHECK(is_cpu(tensor), op_, ": ", name, " is on ", device_of(tensor), "; expected cpu");
}

void ArgumentChecker::contiguous(const char* name, const Tensor& tensor) {
  PAGEDINFER_CHECK(tensor.is_contiguous(), op_, ": ", name, " has shape ", shape_of(tensor),
                   " and strides ", joined(tensor.strides()), "; expected contiguous");
}

void ArgumentChecker::dense_inner(const char* name, const Tensor& tensor, int64_t count) {
  int64_t stride = 1;
  bool dense = true;
  for (int64_t i = tensor.dim() - 1; i >= tensor.dim() - count; --i) {
    dense &= tensor.size(i) <= 1 || tensor.stride(i) == stride;
    stride *= tensor.size(i);
  }
  PAGEDINFER_CHECK(dense, op_, ": ", name, " has shape ", shape_of(tensor), " and strides ",
                   joined(tensor.strides()), "; expected the last ", count,
                   " dimension(s) contiguous");
}

void ArgumentChecker::aligned(const char* name, const Tensor& tensor, int64_t bytes) {
  auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  bool ok = address % bytes == 0;
  int64_t element = static_cast<int64_t>(tensor.element_size());
  for (int64_t i = 0; i + 1 < tensor.dim(); ++i) {
    ok &= tensor.size(i) <= 1 || tensor.stride(i) * element % bytes == 0;
  }
  PAGEDINFER_CHECK(ok, op_, ": ", name, " has strides ", joined(tensor.strides()), " at address ",
                   tensor.const_data_ptr(), "; expected rows that start at multiples of ", bytes,
                   " bytes");
}

int64_t ArgumentChecker::size(const char* dim) const {
  for (const auto& entry : sizes_) {
    if (entry.first == dim) return entry.second;
  }
  throw std::logic_error(std::string(op_) + ": no dimension named " + dim);
}

}  // namespace pagedinfer
