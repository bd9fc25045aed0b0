package sharded

import (
	"context"
	"encoding/json"
	"fmt"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/drover-sh/drover/sharding"
)

// Where the UID decides who owns an object, one that is deleted and made anew under its name goes to another Virtual Node.
// Whoever had the first may be at work on the name, and must neither see nor write the second.

// replaced reports whether what a job reconciles is not there any more, and another object, in vn, has its name.
func (e *member) replaced(j *job, k *kind, key client.ObjectKey, vn sharding.VirtualNode) bool {
	return e.byUID && j != nil && j.kind == k && j.key == keyOf(key) && vn != j.ticket.VN
}

// errReplaced ends the reconcile, which is then dropped: whoever owns the other object is told of it. The lock is held.
func (e *member) errReplaced(j *job) error {
	j.replaced = true
	delete(j.kind.store.tombstones, j.key)
	return fmt.Errorf("get %s %s: another object has taken its name: %w", j.kind.resource, j.key, ErrNotOwned)
}

// wasReplaced reports whether the job has met another object in the place of its own.
func (e *member) wasReplaced(j *job) bool {
	e.mu.RLock()
	defer e.mu.RUnlock()
	return j.replaced
}

// sameObject makes a patch of obj one that another object of its name refuses.
func (c *guardedClient) sameObject(ctx context.Context, obj client.Object, p client.Patch) client.Patch {
	if !c.guardsUID(ctx, obj) {
		return p
	}
	return uidPatch{p}
}

// guardsUID reports whether a write of obj must not reach another object of its name.
func (c *guardedClient) guardsUID(ctx context.Context, obj client.Object) bool {
	e := c.group.member
	if !e.byUID || obj.GetUID() == "" || ctx.Value(unguardedKey{}) != nil {
		return false
	}
	gvk, err := c.GroupVersionKindFor(obj)
	return err == nil && e.byKind[gvk.GroupKind()] != nil
}

// sameDeletion adds the UID to the preconditions of a deletion of obj, unless there is one.
func (c *guardedClient) sameDeletion(ctx context.Context, obj client.Object, opts []client.DeleteOption) []client.DeleteOption {
	if !c.guardsUID(ctx, obj) {
		return opts
	}
	var o client.DeleteOptions
	o.ApplyOptions(opts)
	var p client.Preconditions
	if o.Preconditions != nil {
		p = client.Preconditions(*o.Preconditions)
	}
	if p.UID == nil {
		uid := obj.GetUID()
		p.UID = &uid
	}
	return append(opts[:len(opts):len(opts)], p)
}

// A uidPatch is a patch that only the object of that UID takes. An apply names it by itself.
type uidPatch struct {
	client.Patch
}

// Data implements client.Patch.
func (p uidPatch) Data(obj client.Object) ([]byte, error) {
	data, err := p.Patch.Data(obj)
	if err != nil {
		return nil, err
	}
	switch p.Type() {
	case types.JSONPatchType:
		var ops []any
		if err := json.Unmarshal(data, &ops); err != nil {
			return nil, fmt.Errorf("JSON patch of %s: %w", client.ObjectKeyFromObject(obj), err)
		}
		test := map[string]any{"op": "test", "path": "/metadata/uid", "value": obj.GetUID()}
		return json.Marshal(append([]any{test}, ops...))
	case types.MergePatchType, types.StrategicMergePatchType:
		fields := make(map[string]json.RawMessage)
		metadata := make(map[string]json.RawMessage)
		if err := json.Unmarshal(data, &fields); err != nil {
			return nil, fmt.Errorf("patch of %s: %w", client.ObjectKeyFromObject(obj), err)
		}
		if m, ok := fields["metadata"]; ok {
			if err := json.Unmarshal(m, &metadata); err != nil {
				return nil, fmt.Errorf("patch of %s: metadata: %w", client.ObjectKeyFromObject(obj), err)
			}
		}
		if _, ok := metadata["uid"]; ok {
			return data, nil
		}
		if metadata == nil {
			metadata = make(map[string]json.RawMessage) // the patch has null
		}
		var err error
		if metadata["uid"], err = json.Marshal(obj.GetUID()); err != nil {
			return nil, err
		}
		if fields["metadata"], err = json.Marshal(metadata); err != nil {
			return nil, err
		}
		return json.Marshal(fields)
	default:
		return data, nil
	}
}
