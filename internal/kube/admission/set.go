package admission

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	slashpath "path"
	"strconv"
	"strings"

	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrladmission "sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	v1 "cocoonstack.io/cocoon/api/cocoonset/v1"
	"cocoonstack.io/cocoon/api/contract"
)

// setChecker refuses CocoonSets whose pods or VMs cannot be created.
type setChecker struct {
	decoder ctrladmission.Decoder
	sets    client.Reader
}

// Handle implements admission.Handler.
func (c *setChecker) Handle(ctx context.Context, req ctrladmission.Request) ctrladmission.Response {
	set, old := &v1.CocoonSet{}, &v1.CocoonSet{}
	if err := c.decoder.Decode(req, set); err != nil {
		return unreadable(err)
	}
	set.Namespace = req.Namespace
	errs := checkSet(set)
	var list v1.CocoonSetList
	if err := c.sets.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		return failed(fmt.Errorf("list CocoonSets: %w", err))
	}
	errs = append(errs, checkNamesTaken(set, list.Items)...)
	if req.Operation == admissionv1.Update {
		if err := c.decoder.DecodeRaw(req.OldObject, old); err != nil {
			return unreadable(err)
		}
		old.Namespace = req.Namespace
		errs = fresh(errs, append(checkSet(old), checkNamesTaken(old, list.Items)...))
	}
	return refuse(v1.GroupVersion.WithKind("CocoonSet").GroupKind(), set.Name, errs)
}

// checkSet checks the rules for a single set that the schema cannot express.
func checkSet(set *v1.CocoonSet) field.ErrorList {
	spec := field.NewPath("spec")
	agent := &set.Spec.Agent
	errs := labelled(field.NewPath("metadata", "name"), set.Name)
	if set.Spec.NodeName != "" {
		errs = append(errs, dns(spec.Child("nodeName"), set.Spec.NodeName)...)
	}
	errs = append(errs, checkOptions(&agent.VMOptions, spec.Child("agent"))...)
	errs = append(errs, checkImage(set.Namespace, contract.Mode(agent.Mode), agent.Image, spec.Child("agent", "image"))...)
	errs = append(errs, checkEnvFrom(agent.EnvFrom, spec.Child("agent", "envFrom"))...)
	if agent.ServiceAccountName != "" {
		errs = append(errs, dns(spec.Child("agent", "serviceAccountName"), agent.ServiceAccountName)...)
	}
	for i := range set.Spec.Toolboxes {
		t, path := &set.Spec.Toolboxes[i], spec.Child("toolboxes").Index(i)
		errs = append(errs, labelled(path.Child("name"), t.Name)...)
		errs = append(errs, checkOptions(&t.VMOptions, path)...)
		if t.Mode == contract.ModeStatic {
			if a, err := netip.ParseAddr(t.StaticIP); err != nil || a.Zone() != "" {
				errs = append(errs, field.Invalid(path.Child("staticIP"), t.StaticIP, "must be an IP address"))
			}
			continue // it creates no VM
		}
		errs = append(errs, checkImage(set.Namespace, t.Mode, t.Image, path.Child("image"))...)
	}
	return errs
}

// labelled refuses a name that is not a valid label value, because the pods of a set have the name in a label.
func labelled(path *field.Path, value string) field.ErrorList {
	return valid(path, value, validation.IsValidLabelValue)
}

func dns(path *field.Path, value string) field.ErrorList {
	return valid(path, value, validation.IsDNS1123Subdomain)
}

func valid(path *field.Path, value string, check func(string) []string) field.ErrorList {
	if why := check(value); len(why) > 0 {
		return field.ErrorList{field.Invalid(path, value, strings.Join(why, "; "))}
	}
	return nil
}

// checkImage refuses invalid image names, and in mode clone, names of snapshots of other namespaces.
func checkImage(namespace string, mode contract.Mode, image string, path *field.Path) field.ErrorList {
	if image == "" {
		return nil // the schema reports that
	}
	if mode == contract.ModeClone {
		ref, err := contract.ParseSnapshotRef(image)
		if bad, ok := errors.AsType[contract.KeyError](err); ok {
			return field.ErrorList{field.Invalid(path, image, bad.Reason)}
		}
		if _, vmName := slashpath.Split(ref.Repo); !contract.MayName(namespace, vmName) {
			return field.ErrorList{field.Forbidden(path, strconv.Quote(image)+" is the name of a VM of another namespace")}
		}
		return nil
	}
	if strings.ContainsFunc(image, func(r rune) bool { return r <= ' ' || r == 0x7f }) {
		return field.ErrorList{field.Invalid(path, image, "must not contain white space")}
	}
	return nil
}

// checkOptions refuses VM options that are invalid for a pod.
func checkOptions(o *v1.VMOptions, path *field.Path) field.ErrorList {
	var errs field.ErrorList
	if o.Storage != nil && o.Storage.Sign() <= 0 {
		errs = append(errs, field.Invalid(path.Child("storage"), o.Storage.String(), "must be a positive quantity such as 10Gi"))
	}
	if strings.TrimSpace(o.Network) != o.Network {
		errs = append(errs, field.Invalid(path.Child("network"), o.Network, "must not begin or end with white space"))
	}
	at := path.Child("resources")
	errs = append(errs, checkAmounts(o.Resources.Limits, at.Child("limits"))...)
	errs = append(errs, checkAmounts(o.Resources.Requests, at.Child("requests"))...)
	for name, request := range o.Resources.Requests {
		if limit, given := o.Resources.Limits[name]; given && request.Cmp(limit) > 0 {
			errs = append(errs, field.Invalid(at.Child("requests").Key(string(name)), request.String(), "must not be more than the limit of "+limit.String()))
		}
	}
	if len(o.Resources.Claims) > 0 {
		errs = append(errs, field.Forbidden(at.Child("claims"), "a VM cannot have devices"))
	}
	return errs
}

func checkAmounts(list corev1.ResourceList, path *field.Path) field.ErrorList {
	var errs field.ErrorList
	for name, amount := range list {
		switch name {
		case corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceEphemeralStorage:
			if amount.Cmp(resource.Quantity{}) <= 0 {
				errs = append(errs, field.Invalid(path.Key(string(name)), amount.String(), "must be positive"))
			}
		default:
			errs = append(errs, field.NotSupported(path, name, []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceEphemeralStorage}))
		}
	}
	return errs
}

func checkEnvFrom(from []corev1.EnvFromSource, path *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, e := range from {
		at := path.Index(i)
		switch {
		case (e.ConfigMapRef == nil) == (e.SecretRef == nil):
			errs = append(errs, field.Invalid(at, "", "must have exactly one of configMapRef and secretRef"))
		case e.ConfigMapRef != nil:
			errs = append(errs, dns(at.Child("configMapRef", "name"), e.ConfigMapRef.Name)...)
		default:
			errs = append(errs, dns(at.Child("secretRef", "name"), e.SecretRef.Name)...)
		}
	}
	return errs
}

// taken holds the names of the pods that a set creates.
type taken struct {
	prefix    string
	replicas  int32
	toolboxes map[string]bool
}

func namesOf(set *v1.CocoonSet) taken {
	t := taken{prefix: set.Name, replicas: set.Spec.Agent.Replicas, toolboxes: map[string]bool{}}
	for _, box := range set.Spec.Toolboxes {
		if box.Mode != contract.ModeStatic {
			t.toolboxes[t.prefix+"-"+box.Name] = true
		}
	}
	return t
}

func (t taken) has(name string) bool {
	if t.toolboxes[name] {
		return true
	}
	slot, ok := strings.CutPrefix(name, t.prefix+"-")
	n, err := strconv.ParseInt(slot, 10, 32)
	return ok && err == nil && strconv.FormatInt(n, 10) == slot && n >= 0 && int32(n) <= t.replicas
}

// checkNamesTaken refuses a set if one of its pods, and so its VM, would have the name of a pod of another set. A pod's name
// is the set's name and the slot joined by a dash, and both may contain dashes. Sets of other namespaces cannot conflict.
func checkNamesTaken(set *v1.CocoonSet, others []v1.CocoonSet) field.ErrorList {
	const why = "the pod name %s belongs to CocoonSet %s; choose another name"
	mine := namesOf(set)
	var errs field.ErrorList
	for i := range others {
		other := &others[i]
		if other.Namespace != set.Namespace || other.Name == set.Name {
			continue
		}
		theirs := namesOf(other)
		for name := range theirs.toolboxes {
			if mine.has(name) && !mine.toolboxes[name] {
				errs = append(errs, field.Invalid(field.NewPath("metadata", "name"), set.Name, fmt.Sprintf(why, name, other.Name)))
			}
		}
		for i, box := range set.Spec.Toolboxes {
			if name := mine.prefix + "-" + box.Name; mine.toolboxes[name] && theirs.has(name) {
				errs = append(errs, field.Invalid(field.NewPath("spec", "toolboxes").Index(i).Child("name"), box.Name, fmt.Sprintf(why, name, other.Name)))
			}
		}
	}
	return errs
}
