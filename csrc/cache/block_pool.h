// BlockPool: which KV blocks are free, how often each is referenced, and what full blocks hold.
//
// It knows ids only, never memory. A pool stands for one tier (device blocks or CPU blocks).
//
// Free list: doubly linked through the blocks themselves, so that taking a block out of its middle
// (a prefix hit) is O(1). The front is handed out first. A released block that holds known tokens
// goes to the back and keeps them until it is handed out again: what was used least recently is
// lost first. A released block that holds nothing known goes to the front.
//
// Prefix cache: a full block is found by a chained hash of (hash of the prefix, its tokens); the
// chain starts at the hash of the salt. A hash only proposes a candidate. What decides is equality:
// the tokens are compared, and the prefix by its content id. Content ids are handed out once per
// distinct (prefix, tokens) and never again, so equal ids mean equal prefixes, by induction down to
// the root. No collision, found by chance or made on purpose, can serve another prompt's KV.
//
// Several blocks may hold the same content (two requests computed it at the same time): all of them
// are in the map, each under the same content id, and each leaves the map when it is handed out
// again.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace pagedinfer {

class BlockPool {
 public:
  using BlockId = int32_t;
  using BlockList = std::vector<BlockId>;

  // hash_bits < 64 keeps only that many bits of every hash: a test's way to make collisions common.
  BlockPool(int32_t num_blocks, int32_t block_size, int hash_bits = 64);

  int32_t num_blocks() const { return static_cast<int32_t>(blocks_.size()); }
  int32_t block_size() const { return block_size_; }
  int32_t num_free() const { return num_free_; }      // those that hold a known content included
  int32_t num_cached() const { return num_cached_; }  // blocks in the map, free or not
  int32_t ref_count(BlockId block) const { return checked(block).ref_count; }
  bool is_cached(BlockId block) const { return checked(block).content != kNone; }
  uint64_t hash(BlockId block) const { return checked(block).hash; }

  // How many of `blocks` are free: what acquiring them takes from num_free.
  int32_t num_unreferenced(const BlockList& blocks) const;

  // n blocks with one reference each; what they held is forgotten (or moved to the lower tier).
  BlockList allocate(int32_t n);
  // One more reference for each; a free one must be cached (that is what brings it back).
  void acquire(const BlockList& blocks);
  // One reference less for each. Goes from the last to the first, so that of one sequence the end
  // is evicted before the beginning.
  void release(const BlockList& blocks);

  // The leading blocks of a prompt that this pool holds: the longest run from the start of `tokens`
  // (num_full_blocks * block_size of them). No reference is taken.
  BlockList match(const int32_t* tokens, int32_t num_full_blocks, const std::string& salt) const;
  // match() here, then on from there in the lower tier.
  std::pair<BlockList, BlockList> match_tiers(const int32_t* tokens, int32_t num_full_blocks,
                                              const std::string& salt) const;
  // Makes neighbouring full blocks of one sequence known. `tokens` are theirs; `before` is the
  // block in front of them, -1 if they begin the sequence (only then is the salt looked at). If
  // `before` is not known (the cache was reset), nothing happens; a block that is known already is
  // left as it is.
  void insert(BlockId before, const BlockList& blocks, const int32_t* tokens,
              const std::string& salt);
  // Forgets what these blocks hold; the blocks themselves stay as they are.
  void forget(const BlockList& blocks);
  void reset_cache();

  // ---- two tiers ----
  // Blocks evicted here move to `lower` (which must outlive this pool) while it has room: see
  // take_demotions.
  void set_lower_tier(BlockPool* lower);
  // The copies that evictions asked for since the last call, as (block here, block in the lower
  // tier). Each holds a reference on its lower block until the caller releases it: nothing else may
  // be written there before the copy is done.
  std::vector<std::pair<BlockId, BlockId>> take_demotions();
  // What a transfer to another tier takes: blocks there, one for each block here, with one
  // reference each; and the copies to make, as (block here, block there), for those that do not
  // hold it already.
  struct Transfer {
    BlockList blocks;
    std::vector<std::pair<BlockId, BlockId>> copies;
  };
  // Finds or allocates a block of `to` for the content of each of `blocks`, all of which are
  // referenced. What is known about a block is known about its new place at once. Empty, and
  // nothing is changed, if `to` has too few free blocks.
  std::optional<Transfer> transfer(const BlockList& blocks, BlockPool& to);

  // Every invariant of the lists and the map; throws std::logic_error. For tests: O(num_blocks).
  void check() const;

 private:
  static constexpr BlockId kEnd = -1;
  static constexpr uint64_t kNone = 0;  // content: nothing known; parent: the root

  struct Block {
    int32_t ref_count = 0;
    BlockId prev = kEnd, next = kEnd;          // free list, while ref_count == 0
    BlockId map_prev = kEnd, map_next = kEnd;  // its bucket's chain, while content != kNone
    uint64_t hash = 0, content = kNone, parent = kNone;
  };

  Block& checked(BlockId block);
  const Block& checked(BlockId block) const;
  const int32_t* tokens_of(BlockId block) const;
  BlockId& bucket(uint64_t hash) { return buckets_[hash & (buckets_.size() - 1)]; }
  BlockId bucket(uint64_t hash) const { return buckets_[hash & (buckets_.size() - 1)]; }
  uint64_t hash_root(const std::string& salt) const;
  uint64_t hash_block(uint64_t prefix_hash, const int32_t* tokens) const;

  void unlink_free(BlockId block);
  void push_free_front(BlockId block);
  void push_free_back(BlockId block);
  BlockId find(uint64_t hash, uint64_t parent, const int32_t* tokens,
               const std::string& salt) const;
  // The id of a content: what it has in either tier, else a new one.
  uint64_t content_of(uint64_t hash, uint64_t parent, const int32_t* tokens,
                      const std::string& salt) const;
  void link(BlockId block, uint64_t hash, uint64_t parent, uint64_t content, const int32_t* tokens,
            const std::string& salt);
  void unlink(BlockId block);
  void evict(BlockId block);
  // A block here with the content of `other_block` of `other`; kEnd: none, or that one is not
  // known.
  BlockId find_same(const BlockPool& other, BlockId other_block) const;
  // Makes `block` known as what `other_block` of `other` holds, if that is known.
  void link_same(BlockId block, const BlockPool& other, BlockId other_block);
  const std::string& salt_of(BlockId block) const;
  void match_from(uint64_t hash, uint64_t parent, const int32_t* tokens, int32_t num_full_blocks,
                  const std::string& salt, BlockList* found) const;

  int32_t block_size_;
  uint64_t hash_mask_;
  int32_t num_free_ = 0;
  int32_t num_cached_ = 0;
  BlockId free_front_ = kEnd, free_back_ = kEnd;
  std::vector<Block> blocks_;
  std::vector<int32_t> tokens_;                     // [num_blocks, block_size], of cached blocks
  std::vector<BlockId> buckets_;                    // heads of the chains; a power of two of them
  std::unordered_map<BlockId, std::string> salts_;  // of first blocks under a salt
  BlockPool* lower_ = nullptr;
  std::vector<std::pair<BlockId, BlockId>> demotions_;
};

}  // namespace pagedinfer
