// change_logits: what a slot's mask, biases and penalties make of its rows of logits, before
// sampling.
//
//   y = -inf                        if the mask does not allow the token
//   y = x + bias                    of tokens that have one
//   y = y / r or y * r              where y > 0 or not, of tokens in the prompt or generated
//   y = y - f * times - g           of tokens generated so many times
//
// with r, f and g the repetition, frequency and presence penalties.
//
// Rows of slots without changes are left out, here and in the memory that is read.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "sampler/sampling_math.h"

namespace pagedinfer {

struct ChangeLogitsParams {
  const void* logits;               // dtype [num_rows, vocab_size and more], row_stride apart
  const int32_t* slots;             // [num_rows]
  const int32_t* kinds;             // [num_slots], bits of LogitsChange; 0: no change
  const float* repetition_penalty;  // [num_slots]
  const float* presence_penalty;    // [num_slots]
  const float* frequency_penalty;   // [num_slots]
  int16_t* token_counts;            // [num_slots, vocab_size and more] or null, counts_stride apart
  const int32_t* bias_ids;          // [num_slots, max_biases]; outside the vocabulary: unused
  const float* bias;                // [num_slots, max_biases]
  const uint32_t* allowed;  // [num_slots, mask_words] or null: a bit a token, the lowest first
  float* changed;           // [num_rows, changed_stride], written where a row changes
  int64_t row_stride, counts_stride, changed_stride, max_biases, mask_words;
  int64_t num_rows, num_slots, vocab_size;
  DType dtype;
};

namespace sampling {

enum LogitsChange : int32_t { kPenalties = 1, kBias = 2, kMask = 4 };

// A token's count holds how often it was generated in the low 15 bits; the sign says that it is in
// the prompt.
constexpr int kMaxTokenCount = 0x7fff;

// A slot's changes.
struct SlotChanges {
  float repetition_penalty, presence_penalty, frequency_penalty;
  const int16_t* token_counts;  // of the slot; null: no penalties
  const uint32_t* allowed;      // of the slot; null: all are
};

// A token without a bias has one of -0.0, which leaves its logit as it is.
PAGEDINFER_SHARED float changed_logit(const SlotChanges& slot, float x, float bias, int64_t id) {
  if (slot.allowed != nullptr && (slot.allowed[id / 32] >> (id % 32) & 1u) == 0) {
    return float_of(0xff800000u);  // -inf
  }
  float y = add(x, bias);
  if (slot.token_counts == nullptr || slot.token_counts[id] == 0) return y;
  y = y > 0.0f ? divide(y, slot.repetition_penalty) : multiply(y, slot.repetition_penalty);
  const int times = slot.token_counts[id] & kMaxTokenCount;
  if (times == 0) return y;
  y = subtract(y, multiply(slot.frequency_penalty, static_cast<float>(times)));
  return subtract(y, slot.presence_penalty);
}

PAGEDINFER_SHARED SlotChanges slot_changes(const ChangeLogitsParams& p, int32_t slot) {
  const int32_t kinds = p.kinds[slot];
  const bool penalties = (kinds & kPenalties) != 0 && p.token_counts != nullptr;
  const bool mask = (kinds & kMask) != 0 && p.allowed != nullptr;
  return {p.repetition_penalty[slot], p.presence_penalty[slot], p.frequency_penalty[slot],
          penalties ? p.token_counts + slot * p.counts_stride : nullptr,
          mask ? p.allowed + slot * p.mask_words : nullptr};
}

// Whether a row is to be changed.
PAGEDINFER_SHARED bool is_changed(const int32_t* kinds, int32_t slot, int64_t num_slots) {
  return kinds != nullptr && slot >= 0 && slot < num_slots && kinds[slot] != 0;
}

// Counts a drawn token, if the slot has penalties.
PAGEDINFER_SHARED void count_token(const ChangeLogitsParams& p, int32_t slot, int64_t id) {
  if ((p.kinds[slot] & kPenalties) == 0 || p.token_counts == nullptr) return;
  int16_t& count = p.token_counts[slot * p.counts_stride + id];
  if ((count & kMaxTokenCount) < kMaxTokenCount) ++count;
}

}  // namespace sampling
}  // namespace pagedinfer
