// Package wire translates between the vocabulary of package capacity and the protobuf of the roll-up protocol
// (section 7). Both directions keep everything that the protocol carries; what comes in is checked, and an error
// names the field and the value, in the message's own terms.
//
// It moves values and nothing else: it never talks to a peer and never decides. Start reading at NeedToProto.
package wire
