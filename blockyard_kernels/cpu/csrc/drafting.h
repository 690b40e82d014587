// Drafts of the next ids of rows: what followed where a row's last ids stood before. See blockyard_kernels/drafting.py.
#pragma once

#include <algorithm>
#include <cstdint>

// Mirrored field by field in blockyard_kernels/cpu/drafting.py.
struct DraftRows {
    int64_t num_rows;
    int64_t vocab_size;
    int32_t* token_ids;         // [all rows, stride]: drafts are written behind the known ids of a row
    int64_t stride;
    const int64_t* rows;        // [num_rows]: which of all rows
    const int64_t* lengths;     // [num_rows]: known ids
    const int64_t* most;        // [num_rows]: drafts that are wanted
    const int32_t* const* predicted;    // [num_rows]: another text of each row, or null
    const int64_t* num_predicted;
    int64_t* num_drafts;        // [num_rows], written, as is num_matched
    int64_t* num_matched;
};

constexpr int64_t LEAST_MATCH = 2, LONGEST_MATCH = 32;

// The ids before `end` of a text are the last ids of a row.
struct TextMatch {
    int64_t end = 0, length = 0;
};

class SuffixSearch {
   public:
    // `known`: the row's ids.
    SuffixSearch(const int32_t* known, int64_t length, int64_t vocab_size) : last_(known + length), vocab_size_(vocab_size) {
        const int64_t most = std::min(length, LONGEST_MATCH);
        while (limit_ < most && is_token(last_[-1 - limit_])) limit_++;
    }

    // Finds the longest match, of equally long ones the last, behind which the text goes on. Ids that are no tokens end
    // the search.
    TextMatch find(const int32_t* text, int64_t length) const {
        TextMatch best;
        if (limit_ < LEAST_MATCH || length <= LEAST_MATCH || !is_token(text[length - 1])) return best;
        for (int64_t end = length - 1; end >= LEAST_MATCH;) {
            const int64_t first = std::max(LEAST_MATCH, end - PIECE + 1);
            if (may_end_in(text, first, end))
                for (int64_t place = end; place >= first; place--) {
                    if (!is_token(text[place - 1])) return best;
                    const int64_t matched = count_matched(text, place);
                    if (matched >= LEAST_MATCH && matched > best.length) best = {place, matched};
                    if (best.length == limit_) return best;
                }
            end = first - 1;
        }
        return best;
    }

   private:
    static constexpr int64_t PIECE = 64;

    bool is_token(int32_t id) const { return (uint32_t)id < (uint64_t)vocab_size_; }

    // Whether one of the places [first, last] may be the end of a match, or of the search.
    bool may_end_in(const int32_t* text, int64_t first, int64_t last) const {
        const int32_t one = last_[-1], before = last_[-2];
        const uint32_t vocab_size = (uint32_t)std::min<int64_t>(vocab_size_, UINT32_MAX);
        uint32_t found = 0;
        for (int64_t place = first; place <= last; place++)
            found |= ((text[place - 1] == one) & (text[place - 2] == before)) | ((uint32_t)text[place - 1] >= vocab_size);
        return found;
    }

    int64_t count_matched(const int32_t* text, int64_t end) const {
        const int64_t most = std::min(end, limit_);
        int64_t count = 0;
        while (count < most && text[end - 1 - count] == last_[-1 - count]) count++;
        return count;
    }

    const int32_t* last_;
    int64_t vocab_size_, limit_ = 0;
};

inline void find_drafts(const DraftRows& wanted) {
    for (int64_t i = 0; i < wanted.num_rows; i++) {
        int32_t* known = wanted.token_ids + wanted.rows[i] * wanted.stride;
        const int64_t length = wanted.lengths[i];
        const SuffixSearch search(known, length, wanted.vocab_size);
        const TextMatch own = search.find(known, length);
        const int64_t num_predicted = wanted.predicted[i] ? wanted.num_predicted[i] : 0;
        const TextMatch other = search.find(wanted.predicted[i], num_predicted);
        int64_t count = 0;
        // The row's text goes on with the drafts themselves.
        if (own.length >= other.length && own.length)
            for (; count < wanted.most[i]; count++) known[length + count] = known[own.end + count];
        else if (other.length)
            for (; count < std::min(wanted.most[i], num_predicted - other.end); count++)
                known[length + count] = wanted.predicted[i][other.end + count];
        wanted.num_drafts[i] = count;
        wanted.num_matched[i] = std::max(own.length, other.length);
    }
}
