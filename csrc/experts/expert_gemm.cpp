#include "experts/expert_gemm.h"

#include "common/check.h"
#include "common/cuda_context.h"
#include "experts/expert_gemm_cuda.h"
#include "ops.h"

namespace pagedinfer {

namespace {

// Checks what both ops have in common and runs one of them.
void run(const char* op, ArgumentChecker& check, const Tensor& input, const Tensor& weight,
         const Tensor& pairs, const Tensor& tiles, int64_t block_rows, Tensor& out,
         ExpertGemmParams params) {
  params.dtype = check.float_dtype("input", input);
  check.float_dtype("weight", weight);
  check.float_dtype("out", out);
  check.dtype("pairs", pairs, ScalarType::Int);
  check.dtype("tiles", tiles, ScalarType::Int);
  for (const auto& [name, tensor] : {std::pair<const char*, const Tensor&>{"input", input},
                                     {"weight", weight},
                                     {"pairs", pairs},
                                     {"tiles", tiles},
                                     {"out", out}}) {
    check.same_device(name, tensor);
    check.contiguous(name, tensor);
  }
  PAGEDINFER_CHECK(tiles.dim() == 2 && tiles.size(1) == 3, op, ": tiles has shape ",
                   shape_of(tiles), "; expected [num_tiles, 3]");
  PAGEDINFER_CHECK(block_rows == 16 || block_rows == 64, op, ": block_rows is ", block_rows,
                   "; expected 16 or 64, and what the tiles were made with");
  params.input = input.const_data_ptr();
  params.weight = weight.const_data_ptr();
  params.pairs = static_cast<const int32_t*>(pairs.const_data_ptr());
  params.tiles = static_cast<const ExpertTile*>(tiles.const_data_ptr());
  params.out = out.mutable_data_ptr();
  params.num_tiles = tiles.size(0);
  params.block_rows = block_rows;
  if (params.num_tiles == 0 || params.columns == 0) return;

  if (is_cpu(input)) {
    PAGEDINFER_CPU_KERNEL(expert_gemm_cpu)(params);
    return;
  }
#ifdef PAGEDINFER_WITH_CUDA
  PAGEDINFER_CHECK(params.dtype != DType::float32, op,
                   ": input is float32; on the GPU expected float16 or bfloat16");
  PAGEDINFER_CHECK(params.width % 8 == 0 && params.columns % 8 == 0, op, ": rows have ",
                   params.width, " elements and results ", params.columns,
                   "; on the GPU expected multiples of 8");
  check.aligned("input", input, 16);
  check.aligned("weight", weight, 16);
  check.aligned("out", out, 16);
  CudaContext context(input);
  check_cuda(op, launch_expert_gemm(params, context.stream()));
#endif
}

}  // namespace

void expert_gate_up(const Tensor& hidden, const Tensor& weight, const Tensor& pairs,
                    const Tensor& tiles, int64_t block_rows, int64_t k, Tensor out) {
  ArgumentChecker check("expert_gate_up");
  check.shape("hidden", hidden, {"num_tokens", "hidden_size"});
  check.shape("pairs", pairs, {"num_pairs"});
  check.shape("out", out, {"num_pairs", "inner"});
  check.shape("weight", weight, {"num_experts", "gate_up_rows", "hidden_size"});
  const int64_t inner = check.size("inner");
  PAGEDINFER_CHECK(weight.size(1) == 2 * inner, "expert_gate_up: weight has shape ",
                   shape_of(weight), "; expected twice out's ", inner, " rows an expert");
  PAGEDINFER_CHECK(k >= 1 && check.size("num_pairs") == k * check.size("num_tokens"),
                   "expert_gate_up: k is ", k, "; expected num_pairs / num_tokens, ",
                   check.size("num_pairs"), " / ", check.size("num_tokens"));
  ExpertGemmParams params{};
  params.k = k;
  params.width = check.size("hidden_size");
  params.columns = inner;
  params.is_gate_up = true;
  run("expert_gate_up", check, hidden, weight, pairs, tiles, block_rows, out, params);
}

void expert_down(const Tensor& input, const Tensor& weight, const Tensor& pairs,
                 const Tensor& tiles, int64_t block_rows, Tensor out) {
  ArgumentChecker check("expert_down");
  check.shape("input", input, {"num_pairs", "inner"});
  check.shape("weight", weight, {"num_experts", "hidden_size", "inner"});
  check.shape("pairs", pairs, {"num_pairs"});
  check.shape("out", out, {"num_pairs", "hidden_size"});
  ExpertGemmParams params{};
  params.k = 1;
  params.width = check.size("inner");
  params.columns = check.size("hidden_size");
  run("expert_down", check, input, weight, pairs, tiles, block_rows, out, params);
}

}  // namespace pagedinfer
