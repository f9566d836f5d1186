from hyradix.spec_decode.ngram import NgramProposer
def build_proposer(name, model, token_ids, kv_slots, memory):
    return NgramProposer(token_ids)
