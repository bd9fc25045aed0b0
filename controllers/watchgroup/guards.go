package watchgroup

import (
	"bytes"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	lbv1alpha1 "github.com/drover-sh/drover/api/loadbalance/v1alpha1"
)

// +kubebuilder:rbac:groups=admissionregistration.k8s.io,resources=mutatingwebhookconfigurations,resourceNames=drover-watchgroup,verbs=list;watch;patch
// +kubebuilder:rbac:groups=admissionregistration.k8s.io,resources=validatingadmissionpolicies,resourceNames=drover-watchgroup-label,verbs=list;watch;patch

const (
	// WebhookConfigurationName is the MutatingWebhookConfiguration whose rules follow the groups.
	WebhookConfigurationName = "drover-watchgroup"
	// PolicyName is the ValidatingAdmissionPolicy whose rules follow the groups. It keeps labels from being edited.
	PolicyName = "drover-watchgroup-label"
	// caPeriod is how often the authority's certificate is read again.
	caPeriod = time.Minute
)

// nothing is the rule of a webhook or policy without groups. A policy has to have one.
var nothing = admissionregistrationv1.Rule{
	APIGroups: []string{lbv1alpha1.GroupName}, APIVersions: []string{"*"}, Resources: []string{"nothing"},
}

// Guards keeps the rules of the webhook and of the policy at the resources that the groups name, so that admission of
// everything else is not concerned. Everything but the rules and the certificate is the manifests'.
type Guards struct {
	Client client.Client
	// CAFile holds the authority of the webhook's certificate; "" leaves the one that is there.
	CAFile string
}

var _ reconcile.Reconciler = &Guards{}

// Reconcile brings the rules up to date. A webhook or policy that is not installed is not missed.
func (g *Guards) Reconcile(ctx context.Context, _ ctrl.Request) (ctrl.Result, error) {
	var groups lbv1alpha1.WatchGroupList
	if err := g.Client.List(ctx, &groups, client.UnsafeDisableDeepCopy); err != nil {
		return ctrl.Result{}, fmt.Errorf("listing WatchGroups: %w", err)
	}
	all, _ := schemes(groups.Items)
	result := ctrl.Result{}
	if g.CAFile != "" {
		result.RequeueAfter = caPeriod // nobody tells when certificates are rotated
	}
	ca, err := g.authority()
	err = errors.Join(err, g.followWebhook(ctx, rules(all), ca), g.followPolicy(ctx, rules(all)))
	if err != nil {
		return ctrl.Result{}, err
	}
	return result, nil
}

// authority returns what CAFile holds, nil for what is there to be left. A file that holds no certificate, as while somebody
// writes it, would have the API server trust nobody, or anybody.
func (g *Guards) authority() ([]byte, error) {
	if g.CAFile == "" {
		return nil, nil
	}
	ca, err := os.ReadFile(g.CAFile)
	if err != nil {
		return nil, fmt.Errorf("webhook.caFile: %w", err)
	}
	if !x509.NewCertPool().AppendCertsFromPEM(ca) {
		return nil, fmt.Errorf("webhook.caFile: %s holds no certificate", g.CAFile)
	}
	return ca, nil
}

// rules name the resources, a rule for each API group.
func rules(all map[schema.GroupResource]scheme) []admissionregistrationv1.Rule {
	byGroup := make(map[string][]string)
	for gr := range all {
		byGroup[gr.Group] = append(byGroup[gr.Group], gr.Resource)
	}
	if len(byGroup) == 0 {
		return []admissionregistrationv1.Rule{nothing}
	}
	var list []admissionregistrationv1.Rule
	for _, group := range slices.Sorted(maps.Keys(byGroup)) {
		slices.Sort(byGroup[group])
		list = append(list, admissionregistrationv1.Rule{
			APIGroups: []string{group}, APIVersions: []string{"*"}, Resources: byGroup[group],
		})
	}
	return list
}

func (g *Guards) followWebhook(ctx context.Context, list []admissionregistrationv1.Rule, ca []byte) error {
	config := &admissionregistrationv1.MutatingWebhookConfiguration{}
	if err := g.Client.Get(ctx, client.ObjectKey{Name: WebhookConfigurationName}, config); err != nil {
		return client.IgnoreNotFound(err)
	}
	before := config.DeepCopy()
	for i := range config.Webhooks {
		w := &config.Webhooks[i]
		old := w.Rules
		w.Rules = nil
		for _, rule := range list {
			w.Rules = append(w.Rules, admissionregistrationv1.RuleWithOperations{
				Operations: []admissionregistrationv1.OperationType{admissionregistrationv1.Create, admissionregistrationv1.Update},
				Rule:       rule,
			})
		}
		if sameRules(old, w.Rules) {
			w.Rules = old
		}
		if ca != nil && !bytes.Equal(w.ClientConfig.CABundle, ca) {
			w.ClientConfig.CABundle = ca
		}
	}
	return g.patch(ctx, config, before)
}

func (g *Guards) followPolicy(ctx context.Context, list []admissionregistrationv1.Rule) error {
	policy := &admissionregistrationv1.ValidatingAdmissionPolicy{}
	if err := g.Client.Get(ctx, client.ObjectKey{Name: PolicyName}, policy); err != nil {
		return client.IgnoreNotFound(err)
	}
	before := policy.DeepCopy()
	if policy.Spec.MatchConstraints == nil {
		policy.Spec.MatchConstraints = &admissionregistrationv1.MatchResources{}
	}
	var next []admissionregistrationv1.NamedRuleWithOperations
	for _, rule := range list {
		// The status of a built-in kind takes labels, too. What is no whole object, such as a Scale, has none and passes.
		for _, resource := range rule.Resources {
			rule.Resources = append(rule.Resources[:len(rule.Resources):len(rule.Resources)], resource+"/*")
		}
		next = append(next, admissionregistrationv1.NamedRuleWithOperations{
			RuleWithOperations: admissionregistrationv1.RuleWithOperations{
				Operations: []admissionregistrationv1.OperationType{admissionregistrationv1.Update}, Rule: rule,
			},
		})
	}
	old := policy.Spec.MatchConstraints.ResourceRules
	if !slices.EqualFunc(old, next, func(a, b admissionregistrationv1.NamedRuleWithOperations) bool {
		return sameRule(a.RuleWithOperations, b.RuleWithOperations)
	}) {
		policy.Spec.MatchConstraints.ResourceRules = next
	}
	return g.patch(ctx, policy, before)
}

func (g *Guards) patch(ctx context.Context, o, before client.Object) error {
	if equality.Semantic.DeepEqual(before, o) {
		return nil
	}
	err := g.Client.Patch(ctx, o, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("rules of %s: %w", o.GetName(), err)
	}
	return nil
}

func sameRules(a, b []admissionregistrationv1.RuleWithOperations) bool {
	return slices.EqualFunc(a, b, sameRule)
}

// sameRule compares what we set; the API server fills in the scope.
func sameRule(a, b admissionregistrationv1.RuleWithOperations) bool {
	return slices.Equal(a.Operations, b.Operations) &&
		slices.Equal(a.APIGroups, b.APIGroups) && slices.Equal(a.APIVersions, b.APIVersions) &&
		slices.Equal(a.Resources, b.Resources)
}
