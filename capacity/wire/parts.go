package wire

import (
	"fmt"
	"math"
	"strconv"

	corev1 "k8s.io/api/core/v1"

	pb "github.com/drover-sh/drover/api/rpc/fleet/v1alpha1"
	"github.com/drover-sh/drover/capacity"
)

// RequirementsToProto translates ANDed requirements.
func RequirementsToProto(in []capacity.Requirement) []*pb.NodeSelectorRequirement {
	var out []*pb.NodeSelectorRequirement
	for _, r := range in {
		out = append(out, &pb.NodeSelectorRequirement{Key: r.Key, Operator: string(r.Operator), Values: r.Values})
	}
	return out
}

// RequirementsFromProto is the inverse of RequirementsToProto, Same included. It refuses an empty key, an unknown
// operator and a number of values that the operator cannot take.
func RequirementsFromProto(in []*pb.NodeSelectorRequirement) ([]capacity.Requirement, error) {
	return requirementsFromProto(in, true)
}

func requirementsFromProto(in []*pb.NodeSelectorRequirement, same bool) ([]capacity.Requirement, error) {
	var out []capacity.Requirement
	for i, r := range in {
		req := capacity.Requirement{Key: r.GetKey(), Operator: capacity.Operator(r.GetOperator()), Values: r.GetValues()}
		if field, err := checkRequirement(req, same); err != nil {
			return nil, fmt.Errorf("requirements[%d].%s: %w", i, field, err)
		}
		out = append(out, req)
	}
	return out, nil
}

func checkRequirement(r capacity.Requirement, same bool) (field string, err error) {
	if r.Key == "" {
		return "key", fmt.Errorf("%q: must not be empty", "")
	}
	switch r.Operator {
	case capacity.OperatorIn, capacity.OperatorNotIn:
		if len(r.Values) == 0 {
			return "values", fmt.Errorf("%q: operator %s of key %q needs a value", r.Values, r.Operator, r.Key)
		}
	case capacity.OperatorExists, capacity.OperatorDoesNotExist:
		if len(r.Values) > 0 {
			return "values", fmt.Errorf("%q: operator %s of key %q takes no value", r.Values, r.Operator, r.Key)
		}
	case capacity.OperatorGt, capacity.OperatorLt:
		if len(r.Values) != 1 {
			return "values", fmt.Errorf("%q: operator %s of key %q needs exactly one integer", r.Values, r.Operator, r.Key)
		}
		if _, err := strconv.ParseInt(r.Values[0], 10, 64); err != nil {
			return "values[0]", fmt.Errorf("%q: operator %s of key %q needs an integer", r.Values[0], r.Operator, r.Key)
		}
	case capacity.OperatorSame:
		if !same {
			return "operator", fmt.Errorf("%q: Same binds a need as a whole and stands in its own requirements only", r.Operator)
		}
	default:
		return "operator", fmt.Errorf("%q: must be In, NotIn, Exists, DoesNotExist, Gt, Lt or Same", r.Operator)
	}
	return "", nil
}

// TolerationToProto translates a toleration; tolerationSeconds does not travel.
func TolerationToProto(t corev1.Toleration) *pb.Toleration {
	return &pb.Toleration{Key: t.Key, Operator: string(t.Operator), Value: t.Value, Effect: string(t.Effect)}
}

// TolerationFromProto is the inverse of TolerationToProto.
func TolerationFromProto(in *pb.Toleration) (corev1.Toleration, error) {
	t := corev1.Toleration{
		Key: in.GetKey(), Operator: corev1.TolerationOperator(in.GetOperator()),
		Value: in.GetValue(), Effect: corev1.TaintEffect(in.GetEffect()),
	}
	switch t.Operator {
	case "", corev1.TolerationOpEqual, corev1.TolerationOpExists, corev1.TolerationOpLt, corev1.TolerationOpGt:
	default:
		return t, fmt.Errorf("operator: %q: must be Exists, Equal, Lt or Gt", t.Operator)
	}
	if t.Key == "" && t.Operator != corev1.TolerationOpExists {
		return t, fmt.Errorf("operator: %q: must be Exists where the key is empty", t.Operator)
	}
	if t.Effect != "" && !knownEffect(t.Effect) {
		return t, fmt.Errorf("effect: %q: must be NoSchedule, PreferNoSchedule, NoExecute or empty", t.Effect)
	}
	return t, nil
}

func tolerationsFromProto(in []*pb.Toleration) ([]corev1.Toleration, error) {
	var out []corev1.Toleration
	for i, t := range in {
		toleration, err := TolerationFromProto(t)
		if err != nil {
			return nil, fmt.Errorf("tolerations[%d].%w", i, err)
		}
		out = append(out, toleration)
	}
	return out, nil
}

// TaintToProto translates a taint; the time at which it was added does not travel.
func TaintToProto(t corev1.Taint) *pb.Taint {
	return &pb.Taint{Key: t.Key, Value: t.Value, Effect: string(t.Effect)}
}

// TaintFromProto is the inverse of TaintToProto.
func TaintFromProto(in *pb.Taint) (corev1.Taint, error) {
	t := corev1.Taint{Key: in.GetKey(), Value: in.GetValue(), Effect: corev1.TaintEffect(in.GetEffect())}
	if t.Key == "" {
		return t, fmt.Errorf("key: %q: must not be empty", "")
	}
	if !knownEffect(t.Effect) {
		return t, fmt.Errorf("effect: %q: must be NoSchedule, PreferNoSchedule or NoExecute", t.Effect)
	}
	return t, nil
}

// TaintsToProto translates a list of taints.
func TaintsToProto(in []corev1.Taint) []*pb.Taint {
	var out []*pb.Taint
	for i := range in {
		out = append(out, TaintToProto(in[i]))
	}
	return out
}

// TaintsFromProto is the inverse of TaintsToProto; the error names the taint: taints[1].effect: …
func TaintsFromProto(in []*pb.Taint) ([]corev1.Taint, error) {
	var out []corev1.Taint
	for i, t := range in {
		taint, err := TaintFromProto(t)
		if err != nil {
			return nil, fmt.Errorf("taints[%d].%w", i, err)
		}
		out = append(out, taint)
	}
	return out, nil
}

func knownEffect(e corev1.TaintEffect) bool {
	switch e {
	case corev1.TaintEffectNoSchedule, corev1.TaintEffectPreferNoSchedule, corev1.TaintEffectNoExecute:
		return true
	}
	return false
}

// sum adds counts that are not negative and caps the result.
func sum(a, b int32) int32 {
	if a > math.MaxInt32-b {
		return math.MaxInt32
	}
	return a + b
}
