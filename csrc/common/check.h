// Argument checks of the ops. Every check throws std::invalid_argument, which reaches Python as a
// ValueError, with the op, the argument, what it is and what was expected.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "common/dtype.h"

namespace pagedinfer {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// A ValueError in Python unless `condition` holds:
//
//   PAGEDINFER_CHECK(n > 0, "n is ", n, "; expected > 0");
#define PAGEDINFER_CHECK(condition, ...)              \
  do {                                                \
    if (!(condition)) {                               \
      std::ostringstream message_;                    \
      ::pagedinfer::append_to(message_, __VA_ARGS__); \
      throw std::invalid_argument(message_.str());    \
    }                                                 \
  } while (false)

template <typename... Parts>
void append_to(std::ostringstream& out, const Parts&... parts) {
  ((out << parts), ...);
}

// A norm's epsilon, as kernels take it: finite and not negative.
float checked_epsilon(const char* op, double epsilon);

const char* name_of(ScalarType type);
std::string shape_of(const Tensor& tensor);
std::string device_of(const Tensor& tensor);

// Checks the tensors of one op call against each other: the symbolic dimensions are named once, get
// their size from the first tensor that has them, and must agree from then on; all tensors must be
// on one device unless a check says otherwise.
//
//   ArgumentChecker check("store_kv");
//   check.shape("key", key, {"num_tokens", "num_kv_heads", "head_dim"});
//   check.shape("slot_mapping", slot_mapping, {"num_tokens"});
//   int64_t num_tokens = check.size("num_tokens");
class ArgumentChecker {
 public:
  explicit ArgumentChecker(const char* op) : op_(op) {}

  // `dims`: a name, or a number that the size must equal.
  void shape(const char* name, const Tensor& tensor, std::initializer_list<const char*> dims);
  // One of fp32, fp16, bf16; the same for every tensor checked by this.
  DType float_dtype(const char* name, const Tensor& tensor);
  void dtype(const char* name, const Tensor& tensor, ScalarType expected);
  // All on the device of the first tensor checked.
  void same_device(const char* name, const Tensor& tensor);
  void on_cpu(const char* name, const Tensor& tensor);
  void contiguous(const char* name, const Tensor& tensor);
  // The last `count` dimensions lie densely in memory; the ones before may have any stride.
  void dense_inner(const char* name, const Tensor& tensor, int64_t count);
  // The address and the strides before the last dimension are multiples of `bytes`: what vector
  // loads need.
  void aligned(const char* name, const Tensor& tensor, int64_t bytes);
  int64_t size(const char* dim) const;

 private:
  const char* op_;
  std::vector<std::pair<std::string, int64_t>> sizes_;
  bool has_dtype_ = false, has_device_ = false;
  DType dtype_{};
  std::string dtype_from_, device_, device_from_;
};

bool is_cpu(const Tensor& tensor);

}  // namespace pagedinfer
