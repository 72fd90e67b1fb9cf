// The plan of one batch call, handed from the half that may throw to the half that cannot.
//
// plan_batch() and the other plan functions check a call, count its blocks and reserve its memory.
// They fill a BatchPlan and leave every sequence as it was, so an error needs no undo. The commit
// functions take the plan and change the sequences; nothing in them allocates or throws.
//
// A plan is reused: each call overwrites the fields that it uses, and the arrays keep their memory.
// Once they have grown, a step allocates nothing.
#pragma once

#include <cstdint>
#include <vector>

#include "kv_cache/siphash.h"

namespace vllm_kernels::kv_cache {

// One sequence of a batch. Positions are indices into the manager's array of sequences.
struct BatchItem {
  static constexpr int32_t kNoParent = -1;

  int32_t position;
  int32_t parent;      // reorder(): position of the sequence to fork from; else kNoParent
  int64_t num_tokens;  // to append, to query, to record or to keep
};

// The full blocks that an item's tokens complete.
struct BlockFill {
  int32_t position;
  int64_t first_token;  // index of the item's first token among the batch's tokens
  int64_t num_blocks;
};

// A completed block that other sequences hold as well; its tokens must be the same for all.
struct SharedFill {
  int32_t block;
  int32_t position;
  int64_t first_token;  // as in BlockFill
  int64_t index;        // of the block among those that the item completes
};

struct BatchPlan {
  std::vector<BatchItem> items;

  // free() and truncate(): tokens that a forward pass has computed, one count an item. Empty: all.
  std::vector<int64_t> num_computed;

  // append() and step().
  int64_t num_blocks = 0;              // blocks to take, those for copies included
  std::vector<int32_t> shared_tails;   // partly filled last blocks with several holders
  std::vector<int32_t> out_of_window;  // blocks that no coming token sees
  std::vector<int32_t> taken;          // the blocks taken, in reverse order

  // take_blocks(): former contents of the blocks taken.
  std::vector<int32_t> evicted;

  // append(), step() and record_tokens() with token ids.
  std::vector<BlockFill> fills;
  std::vector<SharedFill> shared_fills;
  std::vector<Hash> first_hashes;     // of the first block of each fill
  std::vector<int32_t> block_tokens;  // tokens of one block, while it is hashed
};

// The cached prefix of a prompt. Reused like a plan.
struct PrefixLookup {
  std::vector<Hash> hashes;    // of the leading blocks; computed some way ahead of `nodes`
  std::vector<int32_t> nodes;  // of the leading blocks, up to the first unknown one
  int64_t num_blocks = 0;      // leading blocks that a new sequence can share
};

}  // namespace vllm_kernels::kv_cache
