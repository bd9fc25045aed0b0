package vnaffinity

import (
	"fmt"

	"k8s.io/apimachinery/pkg/runtime"

	configv1alpha1 "github.com/drover-sh/drover/api/config/v1alpha1"
)

// decodeArgs reads the plugin's args, strictly, and fills their defaults. The scheduler hands out-of-tree args over as they
// stand in its file; none at all means no role. Errors name the field and the value.
func decodeArgs(obj runtime.Object) (*configv1alpha1.VNAffinityArgs, error) {
	args := &configv1alpha1.VNAffinityArgs{}
	switch t := obj.(type) {
	case nil:
	case *configv1alpha1.VNAffinityArgs:
		args = t.DeepCopy()
		args.Default()
	case *runtime.Unknown:
		if t == nil || len(t.Raw) == 0 {
			break
		}
		if err := configv1alpha1.Decode(t.Raw, args); err != nil {
			return nil, err
		}
	default:
		return nil, fmt.Errorf("want args of kind %s, got %T", args.Kind(), obj)
	}
	if errs := args.Validate(); len(errs) > 0 {
		return nil, errs.ToAggregate()
	}
	return args, nil
}
