//go:build e2e

package vkcocoon_test

import (
	"fmt"
	"strings"
	"testing"

	authv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/testkit/fakenode"
	"cocoonstack.io/cocoon/internal/testkit/kubetest"
)

// rig is a control plane with the default installation of deploy/, and two namespaces with equally named Secrets and ConfigMaps.
type rig struct {
	*kubetest.Cluster
	admin *kubernetes.Clientset
}

func newRig(t *testing.T) *rig {
	t.Helper()
	r := &rig{Cluster: kubetest.Up(t)}
	r.Install(t)
	r.admin = r.client(t, "")
	for _, ns := range []string{"a", "b"} {
		r.Kubectl(t, "", "create", "namespace", ns)
		kubetest.Eventually(t, "the account of "+ns, func() string {
			_, err := r.admin.CoreV1().ServiceAccounts(ns).Get(t.Context(), "default", metav1.GetOptions{})
			return fmt.Sprint(err)
		}, "<nil>")
		for _, name := range []string{"env", "volume", "projected", "pull", "unmounted", "other"} {
			if name == "pull" {
				r.Kubectl(t, "", "create", "secret", "docker-registry", name, "-n", ns, "--docker-server=registry.example", "--docker-username=u", "--docker-password=p")
				continue
			}
			r.Kubectl(t, "", "create", "secret", "generic", name, "-n", ns, "--from-literal=key="+name)
			r.Kubectl(t, "", "create", "configmap", name, "-n", ns, "--from-literal=key="+name)
		}
		r.Kubectl(t, "", "create", "serviceaccount", "worker", "-n", ns)
	}
	return r
}

// client returns a client with the credentials at path; "": the administrator's.
func (r *rig) client(t *testing.T, path string) *kubernetes.Clientset {
	t.Helper()
	config := r.Config
	if path != "" {
		var err error
		if config, err = clientcmd.BuildConfigFromFlags("", path); err != nil {
			t.Fatal(err)
		}
		config.QPS, config.Burst = 1000, 1000
		config.Wrap(kubetest.Patient)
	}
	kube, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	return kube
}

const manifest = `
apiVersion: v1
kind: Pod
metadata: {name: %[1]s, namespace: %[2]s}
spec:
  nodeName: %[3]s
  serviceAccountName: worker
  terminationGracePeriodSeconds: 1
  imagePullSecrets: [{name: pull}]
  containers:
    - name: c
      image: demo
      imagePullPolicy: IfNotPresent
      env: [{name: KEY, valueFrom: {secretKeyRef: {name: env, key: key}}}]
      envFrom: [{configMapRef: {name: env}}]
      volumeMounts: [{name: secret, mountPath: /s}, {name: map, mountPath: /m}, {name: all, mountPath: /all}]
  volumes:
    - {name: secret, secret: {secretName: volume}}
    - {name: map, configMap: {name: volume}}
    - name: all
      projected:
        sources: [{secret: {name: projected}}, {configMap: {name: projected}}, {serviceAccountToken: {path: token, audience: vault}}]
    - {name: unmounted, secret: {secretName: unmounted}}
`

func (r *rig) pod(t *testing.T, namespace, name, node string) *corev1.Pod {
	t.Helper()
	r.Kubectl(t, fmt.Sprintf(manifest, name, namespace, node), "apply", "-f", "-")
	var pod *corev1.Pod
	kubetest.Eventually(t, "pod "+name, func() string {
		var err error
		if pod, err = r.admin.CoreV1().Pods(namespace).Get(t.Context(), name, metav1.GetOptions{}); err != nil {
			return err.Error()
		}
		return string(pod.Status.Phase)
	}, "Running")
	return pod
}

// token requests a token of an account, bound to pod if pod is not nil.
func token(t *testing.T, as *kubernetes.Clientset, namespace, account, audience string, pod *corev1.Pod) error {
	t.Helper()
	r := &authv1.TokenRequest{}
	if audience != "" {
		r.Spec.Audiences = []string{audience}
	}
	if pod != nil {
		r.Spec.BoundObjectRef = &authv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID}
	}
	_, err := as.CoreV1().ServiceAccounts(namespace).CreateToken(t.Context(), account, r, metav1.CreateOptions{})
	return err
}

// attempt is an action that a node tries.
type attempt struct {
	what string
	try  func() error
}

func secret(t *testing.T, as *kubernetes.Clientset, namespace, name string) attempt {
	return attempt{"read secret " + namespace + "/" + name, func() error {
		_, err := as.CoreV1().Secrets(namespace).Get(t.Context(), name, metav1.GetOptions{})
		return err
	}}
}

func configMap(t *testing.T, as *kubernetes.Clientset, namespace, name string) attempt {
	return attempt{"read configmap " + namespace + "/" + name, func() error {
		_, err := as.CoreV1().ConfigMaps(namespace).Get(t.Context(), name, metav1.GetOptions{})
		return err
	}}
}

func refused(t *testing.T, attempts ...attempt) {
	t.Helper()
	for _, a := range attempts {
		if err := a.try(); !apierrors.IsForbidden(err) {
			t.Errorf("%s: %v, want it refused", a.what, err)
		}
	}
}

func granted(t *testing.T, attempts ...attempt) {
	t.Helper()
	for _, a := range attempts {
		if err := a.try(); err != nil {
			t.Errorf("%s: %v", a.what, err)
		}
	}
}

// The credentials of a node give access to what its pods have, and to nothing else.
func TestNodeHasWhatItsPodsHave(t *testing.T) {
	r := newRig(t)
	for _, name := range []string{"n1", "n2"} {
		fakenode.Start(t, fakenode.Options{Name: name, Identity: r.Identity(t, name)})
		kubetest.Eventually(t, "node "+name, func() string {
			out, _ := r.TryKubectl(t, "", "get", "node", name, "-o", `jsonpath={.status.conditions[?(@.type=="Ready")].status}`)
			return out
		}, "True")
	}
	mine, theirs := r.pod(t, "a", "mine", "n1"), r.pod(t, "b", "theirs", "n2")
	n1 := r.client(t, r.Identity(t, "n1"))

	for _, name := range []string{"env", "volume", "projected", "pull", "unmounted"} {
		granted(t, secret(t, n1, "a", name))
		refused(t, secret(t, n1, "b", name))
	}
	for _, name := range []string{"env", "volume", "projected"} {
		granted(t, configMap(t, n1, "a", name))
		refused(t, configMap(t, n1, "b", name))
	}
	watch := func(namespace, name string) attempt {
		return attempt{"watch secret " + namespace + "/" + name, func() error {
			w, err := n1.CoreV1().Secrets(namespace).Watch(t.Context(), metav1.ListOptions{FieldSelector: "metadata.name=" + name})
			if err == nil {
				w.Stop()
			}
			return err
		}}
	}
	granted(t, watch("a", "volume"))
	refused(t, watch("a", "other"), watch("b", "volume"), secret(t, n1, "a", "other"), configMap(t, n1, "a", "other"), secret(t, n1, "kube-system", "none"),
		attempt{"list secrets", func() error {
			_, err := n1.CoreV1().Secrets("a").List(t.Context(), metav1.ListOptions{})
			return err
		}},
		attempt{"read another's pod", func() error {
			_, err := n1.CoreV1().Pods("b").Get(t.Context(), theirs.Name, metav1.GetOptions{})
			return err
		}},
	)
	everybody := attempt{"list everybody's pods", func() error {
		_, err := n1.CoreV1().Pods("").List(t.Context(), metav1.ListOptions{})
		return err
	}}
	granted(t, everybody) // for network policies, and gone with this part
	r.Kubectl(t, "", "delete", "clusterrolebinding", "cocoon-network-policies")
	kubetest.Eventually(t, "the right to list everybody's pods", func() string { return fmt.Sprint(apierrors.IsForbidden(everybody.try())) }, "true")

	account := func(what, namespace, name, audience string, pod *corev1.Pod) attempt {
		return attempt{"token " + what, func() error { return token(t, n1, namespace, name, audience, pod) }}
	}
	granted(t, account("of its pod's account", "a", "worker", "", mine), account("for an audience of a volume", "a", "worker", "vault", mine))
	refused(t,
		account("of a cluster-admin", "kube-system", "clusterrole-aggregation-controller", "", nil),
		account("of a cluster-admin for its pod", "kube-system", "clusterrole-aggregation-controller", "", mine),
		account("that is bound to nothing", "a", "worker", "", nil), account("of another account", "a", "default", "", mine),
		account("for another's pod", "b", "worker", "", theirs), account("for an audience of nobody", "a", "worker", "bank", mine),
	)

	write := func(what, namespace, name, patch string) attempt {
		return attempt{what, func() error {
			_, err := n1.CoreV1().Pods(namespace).Patch(t.Context(), name, types.MergePatchType, []byte(patch), metav1.PatchOptions{}, "status")
			return err
		}}
	}
	annotate := func(key, value string) string {
		return fmt.Sprintf(`{"metadata":{"annotations":{%q:%q}}}`, key, value)
	}
	granted(t, write("say the address of its VM", "a", "mine", annotate(contract.KeyPostCloneHint, "x")), write("a note of somebody's", "a", "mine", annotate("example.com/note", "x")))
	refused(t,
		write("write another's status", "b", "theirs", `{"status":{"message":"x"}}`),
		write("label its pod", "a", "mine", `{"metadata":{"labels":{"app":"victim"}}}`),
		write("have its pod ask for another's VM", "a", "mine", annotate(contract.KeyName, "vk-b-theirs")),
		write("offer forks", "a", "mine", annotate(contract.KeyOfferFork, "true")),
		attempt{"delete another's pod", func() error { return n1.CoreV1().Pods("b").Delete(t.Context(), "theirs", metav1.DeleteOptions{}) }},
		attempt{"make a pod that reads a secret", func() error {
			pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "made"}, Spec: corev1.PodSpec{
				NodeName: "n1", Containers: []corev1.Container{{Name: "c", Image: "demo"}},
				Volumes: []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: "other"}}}},
			}}
			_, err := n1.CoreV1().Pods("b").Create(t.Context(), pod, metav1.CreateOptions{})
			return err
		}},
	)

	// When a pod is gone, the node loses the rights that it had for the pod.
	r.Kubectl(t, "", "delete", "pod", "mine", "-n", "a")
	kubetest.Eventually(t, "the secret of a pod that is gone", func() string {
		return fmt.Sprint(apierrors.IsForbidden(secret(t, n1, "a", "volume").try()))
	}, "true")
}

// The default installation has no account with wide rights. If it is requested, the node works, and has the rights of that role.
func TestWideRoleIsAskedFor(t *testing.T) {
	r := newRig(t)
	for _, right := range [][]string{{"create", "serviceaccounts/token"}, {"get", "secrets"}, {"delete", "pods"}} {
		out, err := r.TryKubectl(t, "", "auth", "can-i", right[0], right[1], "-A", "--as=system:serviceaccount:cocoon-system:vk-cocoon")
		if err == nil || strings.TrimSpace(out) != "no" {
			t.Errorf("by default, may the service account %v? %s, %v", right, out, err)
		}
	}
	r.Wide(t)
	kubeconfig := r.NodeAccount(t, "vk-cocoon", "n1")
	fakenode.Start(t, fakenode.Options{Name: "n1", Kubeconfig: kubeconfig})
	pod := r.pod(t, "a", "p", "n1")
	n1 := r.client(t, kubeconfig)
	granted(t, secret(t, n1, "b", "other")) // a right that the role grants
	for name, as := range map[string]*kubernetes.Clientset{"bound": n1, "loose": r.client(t, r.ServiceAccount(t, "vk-cocoon", nil))} {
		kubetest.Eventually(t, "a cluster-admin's token, asked for with a "+name+" token", func() string { // policies take effect after a moment
			err := token(t, as, "kube-system", "clusterrole-aggregation-controller", "", nil)
			return fmt.Sprint(apierrors.IsForbidden(err) && strings.Contains(err.Error(), "bind the token to one"))
		}, "true")
		granted(t, attempt{"token of a pod's account", func() error { return token(t, as, "a", "worker", "", pod) }})
		if err := token(t, as, "kube-system", "clusterrole-aggregation-controller", "", pod); err == nil {
			t.Errorf("%s: a cluster-admin's token was given for somebody else's pod", name)
		}
	}
	r.Kubectl(t, "", "delete", "pod", "p", "-n", "a", "--timeout=240s")
}
