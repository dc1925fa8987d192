#include "cache/block_pool.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>

namespace pagedinfer {

namespace {

// Shared by all pools, so that a content keeps its id when it moves to another tier.
std::atomic<uint64_t> next_content{1};

// Two 64-bit words into one: the halves of their 128-bit product, folded. Each is first offset by
// an odd constant (of the golden ratio and of the square roots of 2 and 3), so that zeros do not
// absorb.
uint64_t fold(uint64_t a, uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a ^ 0x9E3779B97F4A7C15u) *
                       static_cast<unsigned __int128>(b ^ 0x6A09E667F3BCC909u);
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

constexpr uint64_t kRootHash = 0xBB67AE8584CAA73Bu;

std::string number(int64_t value) { return std::to_string(value); }

}  // namespace

BlockPool::BlockPool(int32_t num_blocks, int32_t block_size, int hash_bits)
    : block_size_(block_size),
      hash_mask_(hash_bits >= 64 ? ~uint64_t{0} : (uint64_t{1} << hash_bits) - 1) {
  if (num_blocks < 0) {
    throw std::invalid_argument("num_blocks must not be negative, got " + number(num_blocks));
  }
  if (block_size < 1) {
    throw std::invalid_argument("block_size must be at least 1, got " + number(block_size));
  }
  if (hash_bits < 0) {
    throw std::invalid_argument("hash_bits must not be negative, got " + number(hash_bits));
  }
  blocks_.resize(num_blocks);
  tokens_.resize(static_cast<size_t>(num_blocks) * block_size);
  size_t num_buckets = 1;
  while (num_buckets < 2 * blocks_.size()) num_buckets *= 2;
  buckets_.assign(num_buckets, kEnd);
  for (BlockId block = 0; block < num_blocks; ++block) push_free_back(block);
}

// ---- references and the free list --------------------------------------------------------------

int32_t BlockPool::num_unreferenced(const BlockList& blocks) const {
  return static_cast<int32_t>(std::count_if(blocks.begin(), blocks.end(),
                                            [&](BlockId block) { return ref_count(block) == 0; }));
}

BlockPool::BlockList BlockPool::allocate(int32_t n) {
  if (n < 0 || n > num_free_) {
    throw std::invalid_argument("cannot allocate " + number(n) + " blocks: " + number(num_free_) +
                                " of " + number(num_blocks()) + " are free");
  }
  BlockList taken(n);
  for (BlockId& block : taken) {
    block = free_front_;
    unlink_free(block);
    evict(block);
    blocks_[block].ref_count = 1;
  }
  return taken;
}

void BlockPool::acquire(const BlockList& blocks) {
  for (const BlockId block : blocks) {
    if (checked(block).ref_count == 0 && !is_cached(block)) {
      throw std::invalid_argument("block " + number(block) + " is free and holds nothing known");
    }
  }
  for (const BlockId block : blocks) {
    if (blocks_[block].ref_count++ == 0) unlink_free(block);
  }
}

void BlockPool::release(const BlockList& blocks) {
  for (auto it = blocks.rbegin(); it != blocks.rend(); ++it) {
    Block& block = checked(*it);
    if (block.ref_count == 0) {
      throw std::invalid_argument("block " + number(*it) + " is free already");
    }
    if (--block.ref_count > 0) continue;
    if (block.content == kNone) {
      push_free_front(*it);
    } else {
      push_free_back(*it);
    }
  }
}

BlockPool::Block& BlockPool::checked(BlockId block) {
  return const_cast<Block&>(static_cast<const BlockPool*>(this)->checked(block));
}

const BlockPool::Block& BlockPool::checked(BlockId block) const {
  if (block < 0 || block >= num_blocks()) {
    throw std::invalid_argument("block " + number(block) + " is not one of the pool's " +
                                number(num_blocks()));
  }
  return blocks_[block];
}

void BlockPool::unlink_free(BlockId block) {
  const auto [prev, next] = std::pair(blocks_[block].prev, blocks_[block].next);
  (prev == kEnd ? free_front_ : blocks_[prev].next) = next;
  (next == kEnd ? free_back_ : blocks_[next].prev) = prev;
  blocks_[block].prev = blocks_[block].next = kEnd;
  --num_free_;
}

void BlockPool::push_free_front(BlockId block) {
  blocks_[block].prev = kEnd;
  blocks_[block].next = free_front_;
  (free_front_ == kEnd ? free_back_ : blocks_[free_front_].prev) = block;
  free_front_ = block;
  ++num_free_;
}

void BlockPool::push_free_back(BlockId block) {
  blocks_[block].next = kEnd;
  blocks_[block].prev = free_back_;
  (free_back_ == kEnd ? free_front_ : blocks_[free_back_].next) = block;
  free_back_ = block;
  ++num_free_;
}

// ---- the prefix cache --------------------------------------------------------------------------

const int32_t* BlockPool::tokens_of(BlockId block) const {
  return tokens_.data() + static_cast<size_t>(block) * block_size_;
}

uint64_t BlockPool::hash_root(const std::string& salt) const {
  uint64_t hash = fold(kRootHash, salt.size());
  for (size_t at = 0; at < salt.size(); at += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, salt.data() + at, std::min(sizeof(word), salt.size() - at));
    hash = fold(hash, word);
  }
  return hash & hash_mask_;
}

uint64_t BlockPool::hash_block(uint64_t prefix_hash, const int32_t* tokens) const {
  uint64_t hash = prefix_hash;
  int32_t at = 0;
  for (; at + 1 < block_size_; at += 2) {
    uint64_t pair;
    std::memcpy(&pair, tokens + at, sizeof(pair));
    hash = fold(hash, pair);
  }
  if (at < block_size_) hash = fold(hash, static_cast<uint32_t>(tokens[at]));
  return hash & hash_mask_;
}

BlockPool::BlockId BlockPool::find(uint64_t hash, uint64_t parent, const int32_t* tokens,
                                   const std::string& salt) const {
  const size_t bytes = block_size_ * sizeof(int32_t);
  for (BlockId block = bucket(hash); block != kEnd; block = blocks_[block].map_next) {
    const Block& candidate = blocks_[block];
    if (candidate.hash == hash && candidate.parent == parent &&
        std::memcmp(tokens_of(block), tokens, bytes) == 0 &&
        (parent != kNone || salt_of(block) == salt)) {
      return block;
    }
  }
  return kEnd;
}

uint64_t BlockPool::content_of(uint64_t hash, uint64_t parent, const int32_t* tokens,
                               const std::string& salt) const {
  const BlockId here = find(hash, parent, tokens, salt);
  if (here != kEnd) return blocks_[here].content;
  const BlockId below = lower_ == nullptr ? kEnd : lower_->find(hash, parent, tokens, salt);
  return below == kEnd ? next_content++ : lower_->blocks_[below].content;
}

const std::string& BlockPool::salt_of(BlockId block) const {
  static const std::string none;
  if (salts_.empty()) return none;
  const auto it = salts_.find(block);
  return it == salts_.end() ? none : it->second;
}

void BlockPool::match_from(uint64_t hash, uint64_t parent, const int32_t* tokens,
                           int32_t num_full_blocks, const std::string& salt,
                           BlockList* found) const {
  for (int32_t i = 0; i < num_full_blocks; ++i, tokens += block_size_) {
    hash = hash_block(hash, tokens);
    const BlockId block = find(hash, parent, tokens, salt);
    if (block == kEnd) return;
    found->push_back(block);
    parent = blocks_[block].content;
  }
}

BlockPool::BlockList BlockPool::match(const int32_t* tokens, int32_t num_full_blocks,
                                      const std::string& salt) const {
  BlockList found;
  match_from(hash_root(salt), kNone, tokens, num_full_blocks, salt, &found);
  return found;
}

std::pair<BlockPool::BlockList, BlockPool::BlockList> BlockPool::match_tiers(
    const int32_t* tokens, int32_t num_full_blocks, const std::string& salt) const {
  std::pair<BlockList, BlockList> found{match(tokens, num_full_blocks, salt), {}};
  if (lower_ == nullptr) return found;
  const auto num_found = static_cast<int32_t>(found.first.size());
  const bool none = num_found == 0;
  lower_->match_from(none ? hash_root(salt) : blocks_[found.first.back()].hash,
                     none ? kNone : blocks_[found.first.back()].content,
                     tokens + static_cast<size_t>(num_found) * block_size_,
                     num_full_blocks - num_found, salt, &found.second);
  return found;
}

void BlockPool::insert(BlockId before, const BlockList& blocks, const int32_t* tokens,
                       const std::string& salt) {
  for (const BlockId block : blocks) {
    const bool first = before == kEnd;
    if (!first && !is_cached(before)) return;
    if (!is_cached(block)) {
      const uint64_t hash = hash_block(first ? hash_root(salt) : blocks_[before].hash, tokens);
      const uint64_t parent = first ? kNone : blocks_[before].content;
      link(block, hash, parent, content_of(hash, parent, tokens, salt), tokens, salt);
    }
    before = block;
    tokens += block_size_;
  }
}

void BlockPool::link(BlockId block, uint64_t hash, uint64_t parent, uint64_t content,
                     const int32_t* tokens, const std::string& salt) {
  Block& entry = blocks_[block];
  entry.hash = hash;
  entry.parent = parent;
  entry.content = content;
  std::memcpy(tokens_.data() + static_cast<size_t>(block) * block_size_, tokens,
              block_size_ * sizeof(int32_t));
  if (parent == kNone && !salt.empty()) salts_.emplace(block, salt);
  BlockId& head = bucket(hash);
  entry.map_prev = kEnd;
  entry.map_next = head;
  if (head != kEnd) blocks_[head].map_prev = block;
  head = block;
  ++num_cached_;
}

void BlockPool::unlink(BlockId block) {
  Block& entry = blocks_[block];
  (entry.map_prev == kEnd ? bucket(entry.hash) : blocks_[entry.map_prev].map_next) = entry.map_next;
  if (entry.map_next != kEnd) blocks_[entry.map_next].map_prev = entry.map_prev;
  entry.map_prev = entry.map_next = kEnd;
  if (entry.parent == kNone) salts_.erase(block);
  entry.hash = 0;
  entry.content = entry.parent = kNone;
  --num_cached_;
}

void BlockPool::forget(const BlockList& blocks) {
  for (const BlockId block : blocks) {
    if (!is_cached(block)) continue;
    unlink(block);
    if (blocks_[block].ref_count == 0) {  // worth nothing any more: the next to be handed out
      unlink_free(block);
      push_free_front(block);
    }
  }
}

void BlockPool::reset_cache() {
  for (BlockId block = 0; block < num_blocks(); ++block) {
    if (blocks_[block].content != kNone) unlink(block);
  }
}

// ---- two tiers ---------------------------------------------------------------------------------

void BlockPool::set_lower_tier(BlockPool* lower) {
  if (lower != nullptr && (lower->block_size_ != block_size_ || lower->hash_mask_ != hash_mask_)) {
    throw std::invalid_argument("the tiers must agree on the block size: " + number(block_size_) +
                                " and " + number(lower->block_size_));
  }
  lower_ = lower;
}

void BlockPool::evict(BlockId block) {
  if (blocks_[block].content == kNone) return;
  if (lower_ != nullptr && lower_->num_free_ > 0 && lower_->find_same(*this, block) == kEnd) {
    const BlockId below = lower_->allocate(1).front();
    lower_->link_same(below, *this, block);
    demotions_.emplace_back(block, below);
  }
  unlink(block);
}

std::vector<std::pair<BlockPool::BlockId, BlockPool::BlockId>> BlockPool::take_demotions() {
  return std::exchange(demotions_, {});
}

std::optional<BlockPool::Transfer> BlockPool::transfer(const BlockList& blocks, BlockPool& to) {
  Transfer result{BlockList(blocks.size()), {}};
  BlockList known;
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (checked(blocks[i]).ref_count == 0) {
      throw std::invalid_argument("block " + number(blocks[i]) +
                                  " is free: it cannot be transferred");
    }
    result.blocks[i] = to.find_same(*this, blocks[i]);
    if (result.blocks[i] != kEnd) known.push_back(result.blocks[i]);
  }
  const auto num_new = static_cast<int32_t>(blocks.size() - known.size());
  if (num_new > to.num_free_ - to.num_unreferenced(known)) return std::nullopt;
  to.acquire(known);
  const BlockList fresh = to.allocate(num_new);
  auto next = fresh.begin();
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (result.blocks[i] != kEnd) continue;
    result.blocks[i] = *next++;
    to.link_same(result.blocks[i], *this, blocks[i]);
    result.copies.emplace_back(blocks[i], result.blocks[i]);
  }
  return result;
}

void BlockPool::link_same(BlockId block, const BlockPool& other, BlockId other_block) {
  const Block& source = other.blocks_[other_block];
  if (source.content == kNone) return;
  link(block, source.hash, source.parent, source.content, other.tokens_of(other_block),
       other.salt_of(other_block));
}

BlockPool::BlockId BlockPool::find_same(const BlockPool& other, BlockId other_block) const {
  const Block& source = other.blocks_[other_block];
  if (source.content == kNone) return kEnd;
  for (BlockId block = bucket(source.hash); block != kEnd; block = blocks_[block].map_next) {
    if (blocks_[block].content == source.content) return block;
  }
  return kEnd;
}

// ---- self-test ---------------------------------------------------------------------------------

void BlockPool::check() const {
  const auto require = [](bool holds, const char* what) {
    if (!holds) throw std::logic_error(std::string("BlockPool: ") + what);
  };
  int32_t listed = 0;
  BlockId prev = kEnd;
  for (BlockId block = free_front_; block != kEnd; prev = block, block = blocks_[block].next) {
    require(++listed <= num_blocks(), "the free list is a cycle");
    require(blocks_[block].prev == prev, "the free list is broken");
    require(blocks_[block].ref_count == 0, "a block in use is on the free list");
  }
  require(free_back_ == prev, "the free list ends elsewhere");
  require(listed == num_free_, "the free list and its count differ");
  const auto unused = std::count_if(blocks_.begin(), blocks_.end(),
                                    [](const Block& block) { return block.ref_count == 0; });
  require(unused == num_free_, "a block is neither in use nor on the free list");

  int32_t mapped = 0;
  for (const BlockId head : buckets_) {
    BlockId before = kEnd;
    for (BlockId block = head; block != kEnd; before = block, block = blocks_[block].map_next) {
      require(++mapped <= num_blocks(), "a bucket is a cycle");
      require(blocks_[block].map_prev == before, "a bucket is broken");
      require(blocks_[block].content != kNone, "an unknown block is in the map");
      require(bucket(blocks_[block].hash) == head, "a block is in another bucket than its hash's");
    }
  }
  require(mapped == num_cached_, "the map and its count differ");
  const auto known = std::count_if(blocks_.begin(), blocks_.end(),
                                   [](const Block& block) { return block.content != kNone; });
  require(known == num_cached_, "a known block is not in the map");
}

}  // namespace pagedinfer
