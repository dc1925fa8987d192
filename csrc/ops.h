// Every op's entry: checks its arguments, then runs the CPU kernel or launches the CUDA one.
// Schemas and one-line meanings: bindings.cpp. Shapes, dtypes, errors: pagedinfer/ops.py.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

namespace pagedinfer {

using torch::stable::Tensor;

std::tuple<int64_t, int64_t> attention_plan_sizes(const Tensor& query_start_loc, int64_t num_tokens,
                                                  int64_t max_query_len, int64_t num_heads,
                                                  int64_t num_kv_heads, int64_t head_dim,
                                                  int64_t block_size);
void attention_plan(const Tensor& query_start_loc, const Tensor& seq_lens, Tensor plan,
                    int64_t num_tokens, int64_t max_query_len, int64_t num_heads,
                    int64_t num_kv_heads, int64_t head_dim, int64_t block_size,
                    int64_t sliding_window, bool deterministic, std::optional<Tensor> prefix_start,
                    std::optional<Tensor> prefix_lens);
void paged_attention(const Tensor& query, const Tensor& kv_cache, const Tensor& block_table,
                     const Tensor& query_start_loc, const Tensor& seq_lens, const Tensor& plan,
                     Tensor workspace, Tensor out, int64_t max_query_len, double scale,
                     int64_t sliding_window, double logit_cap, std::optional<Tensor> prefix_start,
                     std::optional<Tensor> prefix_lens, std::optional<Tensor> prefix_results);

void rotary_attention(const Tensor& positions, const Tensor& query, const Tensor& key,
                      const Tensor& value, const Tensor& cos_sin_cache, Tensor kv_cache,
                      const Tensor& slot_mapping, const Tensor& block_table, const Tensor& seq_lens,
                      Tensor out, std::optional<Tensor> query_norm_weight,
                      std::optional<Tensor> key_norm_weight, double epsilon, double scale,
                      int64_t sliding_window, double logit_cap);

void store_kv(const Tensor& key, const Tensor& value, Tensor kv_cache, const Tensor& slot_mapping);
void rotary_store_kv(const Tensor& positions, Tensor query, const Tensor& key, const Tensor& value,
                     const Tensor& cos_sin_cache, Tensor kv_cache, const Tensor& slot_mapping,
                     bool interleaved, std::optional<Tensor> query_norm_weight,
                     std::optional<Tensor> key_norm_weight, double epsilon);
void copy_blocks(Tensor kv_cache, const Tensor& mapping);
void swap_blocks(const Tensor& source, Tensor destination, const Tensor& mapping);

int64_t sample_tokens_workspace_size(const Tensor& logits, bool changes);
void sample_tokens(const Tensor& logits, const Tensor& slots, const Tensor& temperature,
                   const Tensor& top_k, const Tensor& top_p, const Tensor& min_p,
                   const Tensor& seeds, const Tensor& positions, int64_t vocab_size,
                   Tensor workspace, Tensor token_ids, std::optional<Tensor> logprobs,
                   std::optional<Tensor> kinds, std::optional<Tensor> repetition_penalty,
                   std::optional<Tensor> presence_penalty, std::optional<Tensor> frequency_penalty,
                   std::optional<Tensor> token_counts, std::optional<Tensor> bias_ids,
                   std::optional<Tensor> bias, std::optional<Tensor> allowed,
                   std::optional<Tensor> wants_logprob);
void top_logprobs(const Tensor& logits, const Tensor& token_ids, int64_t vocab_size,
                  Tensor logprobs, Tensor ranks, Tensor top_ids, Tensor top_logprobs);

void rms_norm(const Tensor& input, const Tensor& weight, double epsilon, Tensor out,
              std::optional<Tensor> residual);
void offset_rms_norm(const Tensor& input, const Tensor& weight, double epsilon, Tensor out,
                     std::optional<Tensor> addend);
void rotary_embedding(const Tensor& positions, Tensor query, std::optional<Tensor> key,
                      const Tensor& cos_sin_cache, bool interleaved);
void silu_and_mul(const Tensor& input, Tensor out);
void skinny_linear(const Tensor& input, const Tensor& weight, std::optional<Tensor> bias,
                   std::optional<Tensor> norm_weight, double epsilon, bool gated,
                   std::optional<Tensor> residual, Tensor out);
int64_t decode_linear_workspace_size(const Tensor& input, const Tensor& weight, bool gated);
void decode_linear(const Tensor& input, const Tensor& weight, std::optional<Tensor> bias,
                   bool gated, int64_t queue, Tensor workspace, Tensor out);
bool half_linear_pays(const Tensor& weight);
void half_linear(const Tensor& input, const Tensor& weight, std::optional<Tensor> bias, Tensor out);

void decode_inputs(const Tensor& packed, const Tensor& last_tokens, const Tensor& num_prompt_tokens,
                   int64_t block_size, Tensor block_table, Tensor output_positions,
                   Tensor input_ids, Tensor positions, Tensor slot_mapping, Tensor row_blocks);
void keep_tokens(const Tensor& slots, const Tensor& token_ids, Tensor last_tokens);
void read_ring(const Tensor& ring, const Tensor& turn, Tensor out);
void write_ring(const Tensor& values, Tensor turn, Tensor ring);
void hold_while(const Tensor& flag, int64_t microseconds);

void peer_all_reduce(Tensor data, const Tensor& memories, int64_t rank, int64_t max_bytes);
void peer_all_reduce_norm(Tensor data, Tensor residual, const Tensor& weight, double epsilon,
                          const Tensor& memories, int64_t rank, int64_t max_bytes);

void route_experts(const Tensor& scores, int64_t block_rows, bool renormalize, Tensor weights,
                   Tensor experts, Tensor pairs, Tensor tiles);
void expert_gate_up(const Tensor& hidden, const Tensor& weight, const Tensor& pairs,
                    const Tensor& tiles, int64_t block_rows, int64_t k, Tensor out);
void expert_down(const Tensor& input, const Tensor& weight, const Tensor& pairs,
                 const Tensor& tiles, int64_t block_rows, Tensor out);
void sum_experts(const Tensor& results, const Tensor& weights, Tensor out);

}  // namespace pagedinfer
