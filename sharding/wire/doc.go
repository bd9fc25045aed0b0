// Package wire translates between the values of package sharding and the objects of api/loadbalance. Both directions keep
// everything that the core looks at; what comes in is checked, and an error names the object, the field and the value.
//
// It moves values and nothing else: it never talks to an API server and never decides. Start reading at Slice.
package wire
