// The table of contents of the kernels: every op's schema, with what it does in one line. An
// argument marked (a!) is written. Shapes, dtypes and errors stand in pagedinfer/ops.py.

#include <torch/csrc/stable/library.h>

#include "ops.h"

STABLE_TORCH_LIBRARY(pagedinfer, m) {
  // ---- attention ----
  // Lengths of the two buffers that a batch of this size needs: (plan int32s, workspace float32s).
  m.def(
      "attention_plan_sizes(Tensor query_start_loc, int num_tokens, int max_query_len, "
      "int num_heads, int num_kv_heads, int head_dim, int block_size) -> (int, int)");
  // Cuts a batch into pieces of equal work, once a step; every layer's paged_attention follows it.
  m.def(
      "attention_plan(Tensor query_start_loc, Tensor seq_lens, Tensor(a!) plan, int num_tokens, "
      "int max_query_len, int num_heads, int num_kv_heads, int head_dim, int block_size, "
      "int sliding_window, bool deterministic, Tensor? prefix_start=None, "
      "Tensor? prefix_lens=None) -> ()");
  // Causal attention of ragged queries (decode rows and prefill chunks alike) over the paged cache.
  m.def(
      "paged_attention(Tensor query, Tensor kv_cache, Tensor block_table, Tensor query_start_loc, "
      "Tensor seq_lens, Tensor plan, Tensor(a!) workspace, Tensor(b!) out, int max_query_len, "
      "float scale, int sliding_window, float logit_cap, Tensor? prefix_start=None, "
      "Tensor? prefix_lens=None, Tensor(c!)? prefix_results=None) -> ()");
  // rotary_store_kv and paged_attention of the newest token of few sequences, in one pass.
  m.def(
      "rotary_attention(Tensor positions, Tensor query, Tensor key, Tensor value, "
      "Tensor cos_sin_cache, Tensor(a!) kv_cache, Tensor slot_mapping, Tensor block_table, "
      "Tensor seq_lens, Tensor(b!) out, Tensor? query_norm_weight, Tensor? key_norm_weight, "
      "float epsilon, float scale, int sliding_window, float logit_cap) -> ()");

  // ---- cache ----
  // Writes a step's keys and values into the slots of the cache; slot -1 writes nothing.
  m.def("store_kv(Tensor key, Tensor value, Tensor(a!) kv_cache, Tensor slot_mapping) -> ()");
  // rms_norm of query's and key's heads (QK-norm; optional), rotary_embedding and store_kv in one
  // pass.
  m.def(
      "rotary_store_kv(Tensor positions, Tensor(a!) query, Tensor key, Tensor value, "
      "Tensor cos_sin_cache, Tensor(b!) kv_cache, Tensor slot_mapping, bool interleaved, "
      "Tensor? query_norm_weight, Tensor? key_norm_weight, float epsilon) -> ()");
  // Copies whole blocks within a cache, as if all sources were read before anything is written.
  m.def("copy_blocks(Tensor(a!) kv_cache, Tensor mapping) -> ()");
  // Copies whole blocks between a cache on the device and one in (pinned) CPU memory.
  m.def("swap_blocks(Tensor source, Tensor(a!) destination, Tensor mapping) -> ()");

  // ---- sampler ----
  // Bytes of workspace that sample_tokens needs for these logits.
  m.def("sample_tokens_workspace_size(Tensor logits, bool changes=False) -> int");
  // Temperature, top-k, top-p, min-p and the draw, each row with the parameters of its slot; before
  // that the masks, biases and penalties of slots whose `kinds` are not 0.
  m.def(
      "sample_tokens(Tensor logits, Tensor slots, Tensor temperature, Tensor top_k, Tensor top_p, "
      "Tensor min_p, Tensor seeds, Tensor positions, int vocab_size, Tensor(a!) workspace, "
      "Tensor(b!) token_ids, Tensor(c!)? logprobs, Tensor? kinds=None, "
      "Tensor? repetition_penalty=None, Tensor? presence_penalty=None, "
      "Tensor? frequency_penalty=None, Tensor(d!)? token_counts=None, Tensor? bias_ids=None, "
      "Tensor? bias=None, Tensor? allowed=None, Tensor? wants_logprob=None) -> ()");
  // Of each row one token's log-probability and rank, and the best tokens with theirs.
  m.def(
      "top_logprobs(Tensor logits, Tensor token_ids, int vocab_size, Tensor(a!) logprobs, "
      "Tensor(b!) ranks, Tensor(c!) top_ids, Tensor(d!) top_logprobs) -> ()");

  // ---- layers ----
  // out = RMSNorm(input) * weight; with a residual: residual += input, then the norm of that.
  m.def(
      "rms_norm(Tensor input, Tensor weight, float epsilon, Tensor(a!) out, Tensor(b!)? residual) "
      "-> ()");
  // out = RMSNorm(input) * (1 + weight), Gemma's; with an addend, addend + that.
  m.def(
      "offset_rms_norm(Tensor input, Tensor weight, float epsilon, Tensor(a!) out, "
      "Tensor? addend=None) -> ()");
  // Rotates query and key in place by their positions' angles (RoPE).
  m.def(
      "rotary_embedding(Tensor positions, Tensor(a!) query, Tensor(b!)? key, Tensor cos_sin_cache, "
      "bool interleaved) -> ()");
  // out = silu(left half of input) * right half of input (SwiGLU).
  m.def("silu_and_mul(Tensor input, Tensor(a!) out) -> ()");
  // A linear layer over few rows, with the norm before it and silu_and_mul or the residual's
  // addition after it.
  m.def(
      "skinny_linear(Tensor input, Tensor weight, Tensor? bias, Tensor? norm_weight, "
      "float epsilon, bool gated, Tensor? residual, Tensor(a!) out) -> ()");
  // Floats of workspace that decode_linear needs.
  m.def("decode_linear_workspace_size(Tensor input, Tensor weight, bool gated) -> int");
  // A linear layer over the rows of a step of decodes, in a half type, with silu_and_mul after it:
  // on GPUs of compute capability 9.0.
  m.def(
      "decode_linear(Tensor input, Tensor weight, Tensor? bias, bool gated, int queue, "
      "Tensor(a!) workspace, Tensor(b!) out) -> ()");
  // Whether half_linear is the quicker way here: on a CPU without arithmetic in weight's dtype.
  m.def("half_linear_pays(Tensor weight) -> bool");
  // out = input . weight^T + bias in a half type, summed in float32. On CPUs only.
  m.def("half_linear(Tensor input, Tensor weight, Tensor? bias, Tensor(a!) out) -> ()");

  // ---- runner ----
  // The inputs of a step of decodes, made from what the device keeps by slot.
  m.def(
      "decode_inputs(Tensor packed, Tensor last_tokens, Tensor num_prompt_tokens, int block_size, "
      "Tensor(a!) block_table, Tensor(b!) output_positions, Tensor(c!) input_ids, "
      "Tensor(d!) positions, Tensor(e!) slot_mapping, Tensor(f!) row_blocks) -> ()");
  // Keeps what a step drew, by slot: the next step's input.
  m.def("keep_tokens(Tensor slots, Tensor token_ids, Tensor(a!) last_tokens) -> ()");
  // What a step is given by the host: out = ring[turn mod places].
  m.def("read_ring(Tensor ring, Tensor turn, Tensor(a!) out) -> ()");
  // What it gives the host, at the same place: ring[turn mod places] = values; then turn + 1.
  m.def("write_ring(Tensor values, Tensor(a!) turn, Tensor(b!) ring) -> ()");
  // The stream waits while flag[0] is not 0, but no longer than so many microseconds.
  m.def("hold_while(Tensor flag, int microseconds) -> ()");

  // ---- distributed ----
  // data = the sum over ranks that can read each other's memory; waits for theirs.
  m.def("peer_all_reduce(Tensor(a!) data, Tensor memories, int rank, int max_bytes) -> ()");
  // peer_all_reduce and rms_norm with a residual in one pass, in place.
  m.def(
      "peer_all_reduce_norm(Tensor(a!) data, Tensor(b!) residual, Tensor weight, float epsilon, "
      "Tensor memories, int rank, int max_bytes) -> ()");

  // ---- mixtures of experts ----
  // Each token's k best experts with their weights, and all (token, expert) pairs sorted by expert,
  // in tiles of at most block_rows.
  m.def(
      "route_experts(Tensor scores, int block_rows, bool renormalize, Tensor(a!) weights, "
      "Tensor(b!) experts, Tensor(c!) pairs, Tensor(d!) tiles) -> ()");
  // out[s] = silu(gate(x)) * up(x) by the expert of pair pairs[s], x its token's row of hidden.
  m.def(
      "expert_gate_up(Tensor hidden, Tensor weight, Tensor pairs, Tensor tiles, int block_rows, "
      "int k, Tensor(a!) out) -> ()");
  // out[pairs[s]] = down(input[s]) by the same expert.
  m.def(
      "expert_down(Tensor input, Tensor weight, Tensor pairs, Tensor tiles, int block_rows, "
      "Tensor(a!) out) -> ()");
  // out = the weighted sum of each token's k results.
  m.def("sum_experts(Tensor results, Tensor weights, Tensor(a!) out) -> ()");
}

// One entry serves both devices: it looks at its tensors and takes the CPU or the CUDA kernel.
#define PAGEDINFER_IMPLEMENT(m)                                                                 \
  m.impl("attention_plan_sizes", TORCH_BOX(&pagedinfer::attention_plan_sizes));                 \
  m.impl("attention_plan", TORCH_BOX(&pagedinfer::attention_plan));                             \
  m.impl("paged_attention", TORCH_BOX(&pagedinfer::paged_attention));                           \
  m.impl("store_kv", TORCH_BOX(&pagedinfer::store_kv));                                         \
  m.impl("rotary_attention", TORCH_BOX(&pagedinfer::rotary_attention));                         \
  m.impl("rotary_store_kv", TORCH_BOX(&pagedinfer::rotary_store_kv));                           \
  m.impl("copy_blocks", TORCH_BOX(&pagedinfer::copy_blocks));                                   \
  m.impl("swap_blocks", TORCH_BOX(&pagedinfer::swap_blocks));                                   \
  m.impl("sample_tokens_workspace_size", TORCH_BOX(&pagedinfer::sample_tokens_workspace_size)); \
  m.impl("sample_tokens", TORCH_BOX(&pagedinfer::sample_tokens));                               \
  m.impl("top_logprobs", TORCH_BOX(&pagedinfer::top_logprobs));                                 \
  m.impl("rms_norm", TORCH_BOX(&pagedinfer::rms_norm));                                         \
  m.impl("offset_rms_norm", TORCH_BOX(&pagedinfer::offset_rms_norm));                           \
  m.impl("rotary_embedding", TORCH_BOX(&pagedinfer::rotary_embedding));                         \
  m.impl("silu_and_mul", TORCH_BOX(&pagedinfer::silu_and_mul));                                 \
  m.impl("skinny_linear", TORCH_BOX(&pagedinfer::skinny_linear));                               \
  m.impl("decode_linear_workspace_size", TORCH_BOX(&pagedinfer::decode_linear_workspace_size)); \
  m.impl("decode_linear", TORCH_BOX(&pagedinfer::decode_linear));                               \
  m.impl("half_linear_pays", TORCH_BOX(&pagedinfer::half_linear_pays));                         \
  m.impl("half_linear", TORCH_BOX(&pagedinfer::half_linear));                                   \
  m.impl("decode_inputs", TORCH_BOX(&pagedinfer::decode_inputs));                               \
  m.impl("keep_tokens", TORCH_BOX(&pagedinfer::keep_tokens));                                   \
  m.impl("read_ring", TORCH_BOX(&pagedinfer::read_ring));                                       \
  m.impl("write_ring", TORCH_BOX(&pagedinfer::write_ring));                                     \
  m.impl("hold_while", TORCH_BOX(&pagedinfer::hold_while));                                     \
  m.impl("peer_all_reduce", TORCH_BOX(&pagedinfer::peer_all_reduce));                           \
  m.impl("peer_all_reduce_norm", TORCH_BOX(&pagedinfer::peer_all_reduce_norm));                 \
  m.impl("route_experts", TORCH_BOX(&pagedinfer::route_experts));                               \
  m.impl("expert_gate_up", TORCH_BOX(&pagedinfer::expert_gate_up));                             \
  m.impl("expert_down", TORCH_BOX(&pagedinfer::expert_down));                                   \
  m.impl("sum_experts", TORCH_BOX(&pagedinfer::sum_experts))

STABLE_TORCH_LIBRARY_IMPL(pagedinfer, CPU, m) { PAGEDINFER_IMPLEMENT(m); }
#ifdef PAGEDINFER_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(pagedinfer, CUDA, m) { PAGEDINFER_IMPLEMENT(m); }
#endif
