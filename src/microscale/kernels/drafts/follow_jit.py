"""The jit code between two steps with drafts: one program a sequence, a lane for each place in its draft. All numbers
are integers, so it gives what the reference gives."""

# mypy: ignore-errors
# (Triton's language and not Python: arguments are tensors, pointers or constants by call.)

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["stride_last", "stride_drafts", "longest"],
    do_not_specialize_on_alignment=[
        "tokens_ptr", "last_first_ptr", "last_lengths_ptr", "last_drafts_ptr", "first_ptr", "lengths_ptr",
        "drafts_ptr", "given_ptr", "own_ptr", "accepted_ptr", "next_drafts_ptr", "moved_ptr",
    ],
)  # fmt: skip
def follow(
    tokens_ptr, last_first_ptr, last_lengths_ptr, last_drafts_ptr, first_ptr, lengths_ptr, drafts_ptr, given_ptr,
    own_ptr, accepted_ptr, next_drafts_ptr, moved_ptr, stride_last, stride_drafts, longest,
    PLACES: tl.constexpr, GIVEN: tl.constexpr, NO_TOKEN: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PLACES)
    last_first = tl.load(last_first_ptr + sequence)
    if GIVEN:
        accepted = tl.load(given_ptr + sequence)
    else:
        # The place of the first draft that is not what was drawn.
        count = tl.load(last_lengths_ptr + sequence)
        there = place < count
        drawn = tl.load(tokens_ptr + last_first + place, mask=there, other=0).to(tl.int64)
        draft = tl.load(last_drafts_ptr + sequence * stride_last + place, mask=there, other=0)
        wrong = tl.where(there & (drawn == draft), PLACES, place)
        accepted = tl.minimum(tl.min(wrong, 0).to(tl.int64), count)
    tl.store(accepted_ptr + sequence, accepted)
    tl.store(own_ptr + sequence, tl.load(tokens_ptr + last_first + accepted).to(tl.int64))
    first, count = tl.load(first_ptr + sequence), tl.load(lengths_ptr + sequence)
    draft = tl.load(drafts_ptr + sequence * stride_drafts + place, mask=place < count, other=NO_TOKEN)
    tl.store(next_drafts_ptr + sequence * longest + place, draft, mask=place < longest)
    tl.store(moved_ptr + first + place, accepted + tl.zeros([PLACES], tl.int64), mask=place <= count)


@triton.jit(
    do_not_specialize=["stride_table", "stride_slots", "stride_shown", "max_pages", "page_size", "longest"],
    do_not_specialize_on_alignment=[
        "own_ptr", "accepted_ptr", "drafts_ptr", "first_ptr", "lengths_ptr", "positions_ptr", "slots_ptr", "lens_ptr",
        "tokens_ptr", "shown_ptr", "table_ptr",
    ],
)  # fmt: skip
def move_on(
    own_ptr, accepted_ptr, drafts_ptr, first_ptr, lengths_ptr, positions_ptr, slots_ptr, lens_ptr, tokens_ptr,
    shown_ptr, table_ptr, stride_table, stride_slots, stride_shown, max_pages, page_size, longest,
    PLACES: tl.constexpr, KINDS: tl.constexpr, TOKENS: tl.constexpr, DRAFTS: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PLACES)
    accepted, first = tl.load(accepted_ptr + sequence), tl.load(first_ptr + sequence)
    there = place <= tl.load(lengths_ptr + sequence)
    rows = first + place
    position = tl.load(positions_ptr + rows, mask=there, other=0) + accepted
    tl.store(positions_ptr + rows, position, mask=there)
    for kind in tl.static_range(KINDS):
        entry = table_ptr + kind * stride_table + sequence * max_pages + position // page_size
        page = tl.load(entry, mask=there, other=0).to(tl.int64)
        tl.store(slots_ptr + kind * stride_slots + rows, page * page_size + position % page_size, mask=there)
    length = tl.load(lens_ptr + sequence)
    tl.store(lens_ptr + sequence, (length + accepted).to(length.dtype))
    if TOKENS:
        guess = tl.load(drafts_ptr + sequence * longest + place - 1, mask=there & (place > 0), other=0)
        token = tl.where(place == 0, tl.load(own_ptr + sequence), guess)
        tl.store(tokens_ptr + rows, token, mask=there)
    if DRAFTS:
        guess = tl.load(drafts_ptr + sequence * longest + place, mask=place < longest, other=0)
        tl.store(shown_ptr + place * stride_shown + sequence, guess, mask=place < longest)
