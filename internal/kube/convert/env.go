package convert

import (
	"context"
	"fmt"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// Resolver reads the objects to which an environment may refer. Both methods return a NotFound error for an object that does
// not exist.
type Resolver interface {
	ConfigMap(ctx context.Context, namespace, name string) (*corev1.ConfigMap, error)
	Secret(ctx context.Context, namespace, name string) (*corev1.Secret, error)
}

// Absent is a missing object or key to which an environment refers.
type Absent struct {
	Kind     string // ConfigMap or Secret
	Name     string
	Key      string // the missing key; "" if the object itself does not exist
	Optional bool
}

// Reason returns the reason that virtual-kubelet uses in Events, such as OptionalSecretNotFound or
// MandatoryConfigMapKeyNotFound.
func (a Absent) Reason() string {
	reason := "Mandatory" + a.Kind
	if a.Optional {
		reason = "Optional" + a.Kind
	}
	if a.Key != "" {
		reason += "Key"
	}
	return reason + "NotFound"
}

// String returns a sentence for the message of an Event.
func (a Absent) String() string {
	kind := strings.ToLower(a.Kind)
	if a.Key != "" {
		return fmt.Sprintf("key %q does not exist in %s %q", a.Key, kind, a.Name)
	}
	return fmt.Sprintf("%s %q not found", kind, a.Name)
}

// Env returns the environment of each of the pod's containers. The order is: variables of the services that the pod may see,
// then envFrom, then env. A later variable replaces an earlier one of the same name.
// Env reports a missing reference to absent, which may be nil. Unless the reference is optional, the error is also
// FailedPrecondition, and the pod waits for the object. Other errors are the Resolver's.
func Env(ctx context.Context, pod *corev1.Pod, node Node, from Resolver, services []*corev1.Service, absent func(Absent)) (Environment, error) {
	if absent == nil {
		absent = func(Absent) {}
	}
	found := serviceEnv(pod, services)
	out := Environment{}
	for _, c := range containers(pod) {
		e := &environment{pod: pod, container: c, node: node, from: from, absent: absent, plain: map[string]string{}, values: map[string]string{}}
		for _, v := range found {
			e.set(v.Name, v.Value)
		}
		vars, err := e.build(ctx)
		if err != nil && Several(pod) {
			err = fmt.Errorf("container %s: %w", c.Name, err)
		}
		if err != nil {
			return nil, err
		}
		out[c.Name] = vars
	}
	return out, nil
}

func (e *environment) build(ctx context.Context) (Variables, error) {
	for _, src := range e.container.EnvFrom {
		if err := e.addAll(ctx, src); err != nil {
			return Variables{}, err
		}
	}
	for _, v := range e.container.Env {
		if inFile(v) {
			e.setFile(v.Name, v.ValueFrom.FileKeyRef)
			continue
		}
		value, ok, err := e.value(ctx, v)
		if err != nil {
			return Variables{}, fmt.Errorf("environment variable %s: %w", v.Name, err)
		}
		if ok {
			e.set(v.Name, value)
		}
	}
	out := make([]vm.EnvVar, 0, len(e.names))
	for _, name := range e.names {
		out = append(out, vm.EnvVar{Name: name, Value: e.plain[name]})
	}
	return Variables{out, e.files}, nil
}

type environment struct {
	pod       *corev1.Pod
	container *corev1.Container
	node      Node
	from      Resolver
	absent    func(Absent)
	names     []string          // of plain, in order of first mention
	plain     map[string]string // without the values from files
	values    map[string]string // with words for the values from files
	files     []vm.FileKey
}

func (e *environment) set(name, value string) {
	if _, known := e.plain[name]; !known {
		e.names = append(e.names, name)
	}
	e.plain[name], e.values[name] = value, value
	for i := range e.files {
		if e.files[i].Name == name {
			e.files[i].Name = ""
		}
	}
}

// inFile reports whether the value of v is in a file of a volume.
func inFile(v corev1.EnvVar) bool { return v.ValueFrom != nil && v.ValueFrom.FileKeyRef != nil }

// setFile sets a variable whose value only the guest knows. If it is optional and absent, the variable keeps the value that it had
// before.
func (e *environment) setFile(name string, ref *corev1.FileKeySelector) {
	before, had := e.values[name]
	if !had {
		before = "$(" + name + ")"
	}
	e.values[name] = vm.FileWord(len(e.files))
	e.files = append(e.files, vm.FileKey{
		Name: name, Volume: ref.VolumeName, Path: path.Clean(ref.Path), Key: ref.Key, Optional: yes(ref.Optional), Absent: before,
	})
}

func (e *environment) addAll(ctx context.Context, src corev1.EnvFromSource) error {
	var data map[string]string
	var err error
	switch {
	case src.ConfigMapRef != nil:
		data, err = e.configMap(ctx, src.ConfigMapRef.Name, src.ConfigMapRef.Optional)
	case src.SecretRef != nil:
		data, err = e.secret(ctx, src.SecretRef.Name, src.SecretRef.Optional)
	}
	if err != nil {
		return err
	}
	for _, key := range slices.Sorted(maps.Keys(data)) {
		if name := src.Prefix + key; nameable(name) { // like the kubelet, skip invalid names
			e.set(name, data[key])
		}
	}
	return nil
}

// value returns the value of v, or false if an optional source is absent.
func (e *environment) value(ctx context.Context, v corev1.EnvVar) (string, bool, error) {
	if v.ValueFrom == nil {
		return expand(v.Value, e.values), true, nil
	}
	switch s := v.ValueFrom; {
	case s.FieldRef != nil:
		value, err := e.field(s.FieldRef.FieldPath)
		return value, true, err
	case s.ResourceFieldRef != nil:
		value, err := e.resource(s.ResourceFieldRef)
		return value, true, err
	case s.ConfigMapKeyRef != nil:
		data, err := e.configMap(ctx, s.ConfigMapKeyRef.Name, s.ConfigMapKeyRef.Optional)
		return e.pick(data, "ConfigMap", s.ConfigMapKeyRef.Name, s.ConfigMapKeyRef.Key, s.ConfigMapKeyRef.Optional, err)
	case s.SecretKeyRef != nil:
		data, err := e.secret(ctx, s.SecretKeyRef.Name, s.SecretKeyRef.Optional)
		return e.pick(data, "Secret", s.SecretKeyRef.Name, s.SecretKeyRef.Key, s.SecretKeyRef.Optional, err)
	}
	return "", false, errdefs.Preconditionf("this node does not support a source of this kind in valueFrom")
}

func (e *environment) pick(data map[string]string, kind, name, key string, optional *bool, err error) (string, bool, error) {
	if err != nil {
		return "", false, err
	}
	value, ok := data[key]
	if !ok && data != nil { // nil: the object does not exist, which is reported already
		e.absent(Absent{kind, name, key, yes(optional)})
	}
	if !ok && !yes(optional) {
		return "", false, errdefs.Preconditionf("couldn't find key %s in %s %s", key, kind, name)
	}
	return value, ok, nil
}

func (e *environment) configMap(ctx context.Context, name string, optional *bool) (map[string]string, error) {
	cm, err := e.from.ConfigMap(ctx, e.pod.Namespace, name)
	if err != nil {
		return nil, e.missing(err, "ConfigMap", name, optional)
	}
	if cm.Data == nil {
		return map[string]string{}, nil
	}
	return cm.Data, nil
}

func (e *environment) secret(ctx context.Context, name string, optional *bool) (map[string]string, error) {
	s, err := e.from.Secret(ctx, e.pod.Namespace, name)
	if err != nil {
		return nil, e.missing(err, "Secret", name, optional)
	}
	data := make(map[string]string, len(s.Data))
	for k, v := range s.Data {
		data[k] = string(v)
	}
	return data, nil
}

func (e *environment) missing(err error, kind, name string, optional *bool) error {
	if errdefs.IsNotFound(err) {
		e.absent(Absent{kind, name, "", yes(optional)})
	}
	return missing(err, strings.ToLower(kind), name, optional)
}

func missing(err error, kind, name string, optional *bool) error {
	switch {
	case !errdefs.IsNotFound(err):
		return fmt.Errorf("read %s %s: %w", kind, name, err)
	case yes(optional):
		return nil
	}
	return errdefs.Preconditionf("%s %q not found", kind, name)
}

func yes(b *bool) bool { return b != nil && *b }

// field returns the value of a field of the pod (downward API). Check has refused fields that are unknown before the guest
// starts.
func (e *environment) field(path string) (string, error) {
	switch path {
	case "metadata.name":
		return e.pod.Name, nil
	case "metadata.namespace":
		return e.pod.Namespace, nil
	case "metadata.uid":
		return string(e.pod.UID), nil
	case "metadata.labels":
		return formatMap(e.pod.Labels), nil
	case "metadata.annotations":
		return formatMap(e.pod.Annotations), nil
	case "spec.nodeName":
		return e.node.Name, nil
	case "spec.serviceAccountName":
		return e.pod.Spec.ServiceAccountName, nil
	case "status.hostIP", "status.hostIPs":
		return e.node.IP, nil
	case "status.podIP": // known when the VM has its interfaces
		return vm.OwnAddress, nil
	case "status.podIPs":
		return vm.OwnAddresses, nil
	}
	if key, ok := subscript(path, "metadata.labels"); ok {
		return e.pod.Labels[key], nil
	}
	if key, ok := subscript(path, "metadata.annotations"); ok {
		return e.pod.Annotations[key], nil
	}
	return "", errdefs.Preconditionf("this node does not support the field %s", path)
}

// subscript extracts key from path = prefix['key'].
func subscript(path, prefix string) (string, bool) {
	rest, ok := strings.CutPrefix(path, prefix+"['")
	if !ok {
		return "", false
	}
	return strings.CutSuffix(rest, "']")
}

func formatMap(m map[string]string) string {
	lines := make([]string, 0, len(m))
	for _, k := range slices.Sorted(maps.Keys(m)) {
		lines = append(lines, k+"="+strconv.Quote(m[k]))
	}
	return strings.Join(lines, "\n")
}

// resource returns the value in the pod's spec, or the real size of the VM if the spec has no value.
func (e *environment) resource(ref *corev1.ResourceFieldSelector) (string, error) {
	which, name, _ := strings.Cut(ref.Resource, ".")
	c := e.container // nil if the value is for a volume
	for _, other := range containers(e.pod) {
		if c == nil || ref.ContainerName != "" && other.Name == ref.ContainerName {
			c = other
		}
	}
	list := c.Resources.Limits
	if which == "requests" {
		list = c.Resources.Requests
	}
	q, ok := list[corev1.ResourceName(name)]
	if !ok {
		ask, _ := contract.ParseVMSpec(e.pod.Annotations)
		s := sizeOf(e.pod, ask)
		switch corev1.ResourceName(name) {
		case corev1.ResourceCPU:
			q = *resource.NewQuantity(int64(s.cpus), resource.DecimalSI)
		case corev1.ResourceMemory:
			q = *resource.NewQuantity(s.memory, resource.BinarySI)
		case corev1.ResourceEphemeralStorage:
			q = *resource.NewQuantity(vm.Spec{Storage: s.storage}.Default().Storage, resource.BinarySI)
		default:
			return "", errdefs.Preconditionf("this node does not support the resource %s", ref.Resource)
		}
	}
	divisor := ref.Divisor
	if divisor.IsZero() {
		divisor = resource.MustParse("1")
	}
	if corev1.ResourceName(name) == corev1.ResourceCPU {
		return strconv.FormatInt(ceilDiv(q.MilliValue(), divisor.MilliValue()), 10), nil
	}
	return strconv.FormatInt(ceilDiv(q.Value(), divisor.Value()), 10), nil
}

func ceilDiv(a, b int64) int64 {
	if b <= 0 {
		return 0
	}
	n := a / b
	if a%b != 0 {
		n++
	}
	return n
}

// nameable reports whether name is a valid name of an environment variable.
func nameable(name string) bool { return name != "" && !strings.ContainsAny(name, "=\x00") }

// expand replaces each $(NAME) in s with the value of the variable NAME, as Kubernetes does in commands, arguments and
// environment values. $$ becomes $, so $$(NAME) becomes the text $(NAME). If there is no variable NAME, $(NAME) stays.
func expand(s string, values map[string]string) string {
	var out strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] != '$' || i+1 == len(s) {
			out.WriteByte(s[i])
			continue
		}
		switch s[i+1] {
		case '$':
			out.WriteByte('$')
			i++
		case '(':
			end := strings.IndexByte(s[i+2:], ')')
			if end < 0 {
				out.WriteString("$(")
				i++
				continue
			}
			name := s[i+2 : i+2+end]
			if v, ok := values[name]; ok {
				out.WriteString(v)
			} else {
				out.WriteString("$(" + name + ")")
			}
			i += 2 + end
		default:
			out.WriteByte('$')
		}
	}
	return out.String()
}
